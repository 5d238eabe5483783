"""What could be wrong with the data: each hypothesis undoes one fault. If the policy's error then falls, that is it.

A hypothesis changes what the policy gets, and turns what it predicts back into what the data would have recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from flexor.evaluate.data_fit.joints import UNITS
from flexor.evaluate.open_loop.samples import Observation, Samples

Actions = Callable[[np.ndarray, Observation], np.ndarray]


def same_observation(observation: Observation) -> Observation:
    return observation


def same_actions(actions: np.ndarray, observation: Observation) -> np.ndarray:
    return actions


@dataclass(frozen=True)
class Hypothesis:
    """A fault, and how it is undone."""

    fault: str  # name of the finding
    text: str  # evidence begins with it
    fix: str
    observe: Callable[[Observation], Observation] = same_observation
    record: Actions = same_actions
    """Predictions as the data would have recorded them. The observation is that of the data."""
    joints: tuple[int, ...] = ()
    """The joints that it concerns; empty: all of them."""
    steps: tuple[int, ...] = ()
    """The steps of the chunk that predictions are compared at; empty: all of them."""


def camera_hypotheses(samples: Samples) -> Iterator[Hypothesis]:
    """Two cameras of the same size are swapped."""
    for first, second in combinations(samples.colour, 2):
        if samples.observation[first].shape != samples.observation[second].shape:
            continue

        def swap(observation: Observation, a: str = first, b: str = second) -> Observation:
            return {**observation, a: observation[b], b: observation[a]}

        yield Hypothesis(
            "cameras swapped",
            f"{first} and {second} look swapped",
            f"give --rename_map='{{{first}: {second}, {second}: {first}}}', or connect them as they were in training",
            swap,
        )


def joint_hypotheses(samples: Samples, joints: Sequence[int]) -> Iterator[Hypothesis]:
    """Signs and the order of these joints."""
    for joint in joints:
        name = samples.joints[joint]
        for parts in _parts(samples, joint):
            where = " and ".join(parts)
            yield Hypothesis(
                "sign flipped",
                f"joint {name} has the opposite sign in the {where}",
                f"multiply {name} by -1 in the {where}: the policy was trained with the other direction",
                *_linear(samples, {joint: -1.0}, {}, parts),
                joints=(joint,),
            )
    for left, right in combinations(sorted(joints), 2):
        names = f"{samples.joints[left]} and {samples.joints[right]}"
        yield Hypothesis(
            "joints permuted",
            f"joints {names} look exchanged",
            "put the joints into the order that the policy was trained with",
            *_linear(samples, {}, {left: right, right: left}, ("state", "action")),
            joints=(left, right),
        )


def unit_hypotheses(samples: Samples, factors: Sequence[float]) -> Iterator[Hypothesis]:
    """Other units of the joints, all or those whose values are far from what the policy was trained on.

    `factors`: by how much larger the values of each joint are than in training.
    """
    for text, factor in UNITS.items():
        joints = [
            j for j, size in enumerate(factors) if size > 0 and abs(np.log(size * factor)) < np.log(2.5)
        ]
        far = [j for j in joints if abs(np.log(factors[j])) > np.log(5)]
        if not far:
            continue
        names = ", ".join(samples.joints[joint] for joint in far)
        yield Hypothesis(
            "other units",
            f"{names} look like {text}",
            f"multiply {names} by {factor:.6g} in the state and the action, or convert the dataset",
            *_linear(samples, dict.fromkeys(far, factor), {}, ("state", "action")),
            joints=tuple(far),
        )


def kind_hypotheses(samples: Samples) -> Iterator[Hypothesis]:
    """The data has relative actions and the policy predicts absolute ones, or the other way round."""
    state, name, pairs = samples.state, samples.state_name, samples.state_of_joint
    if state is None or name is None or all(value is None for value in pairs):
        return

    def offset(observation: Observation) -> np.ndarray:
        values = observation[name].astype(np.float64)
        now = values[:, -1] if values.ndim == 3 else values
        return np.stack([now[:, v] if v is not None else np.zeros(len(now)) for v in pairs], axis=1)[:, None]

    fix = "train with actions of the kind that the robot executes, or convert the dataset's"
    yield Hypothesis(
        "action kind",
        "the data's actions are relative, the policy predicts absolute ones",
        fix,
        record=lambda actions, observation: np.diff(actions, axis=1, prepend=offset(observation)),
    )
    yield Hypothesis(
        "action kind",
        "the data's actions are absolute, the policy predicts relative ones",
        fix,
        record=lambda actions, observation: offset(observation) + np.cumsum(actions, axis=1),
    )


def rate_hypotheses(horizon: int) -> Iterator[Hypothesis]:
    """The data has half or twice the frame rate that the policy was trained with."""
    if horizon < 4:
        return
    fix = "train at the rate of the data, or record at the rate of training"
    half = horizon // 2
    yield Hypothesis(
        "other frame rate",
        "the data moves twice as far per frame as the policy predicts: its frame rate is half of that in training",
        fix,
        record=lambda actions, _: _padded(actions[:, 1::2], horizon),
        steps=tuple(range(half)),
    )
    yield Hypothesis(
        "other frame rate",
        "the data moves half as far per frame as the policy predicts: its frame rate is twice that in training",
        fix,
        record=lambda actions, _: _slower(actions),
        steps=tuple(range(1, horizon)),
    )


def _padded(actions: np.ndarray, horizon: int) -> np.ndarray:
    missing = horizon - actions.shape[1]
    return np.concatenate([actions, np.repeat(actions[:, -1:], missing, axis=1)], axis=1)


def _slower(actions: np.ndarray) -> np.ndarray:
    """Half of the chunk [N, H, A] in H steps."""
    places = (np.arange(actions.shape[1]) - 1) / 2
    low = np.floor(places).clip(0).astype(int)
    share = (places - low).clip(0)[:, None]
    following = np.minimum(low + 1, actions.shape[1] - 1)
    result: np.ndarray = actions[:, low] * (1 - share) + actions[:, following] * share
    return result


def _parts(samples: Samples, joint: int) -> list[tuple[str, ...]]:
    if samples.state is None or samples.state_of_joint[joint] is None:
        return [("action",)]
    return [("state", "action"), ("action",), ("state",)]


def _linear(
    samples: Samples, factors: dict[int, float], order: dict[int, int], parts: Sequence[str]
) -> tuple[Callable[[Observation], Observation], Actions]:
    """Joints times factors, then in another order (which is its own inverse), in the state and the action."""
    count = len(samples.joints)
    places = np.array([order.get(joint, joint) for joint in range(count)])
    scale = np.array([factors.get(joint, 1.0) for joint in range(count)])
    pairs, state = samples.state_of_joint, samples.state_name

    def observe(observation: Observation) -> Observation:
        if state is None or "state" not in parts:
            return observation
        values = observation[state].copy()
        for joint, value in enumerate(pairs):
            source = pairs[places[joint]]
            if value is not None and source is not None:
                values[..., value] = observation[state][..., source] * scale[places[joint]]
        return {**observation, state: values}

    def record(actions: np.ndarray, _: Observation) -> np.ndarray:
        if "action" not in parts:
            return actions
        return (actions / scale)[..., places]

    return observe, record
