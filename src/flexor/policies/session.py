"""The state of one robot between two actions of its policy.

`Pretrained.chunk` has no state, so one policy can control many robots. A session stores, for one robot: the last
observations, the rest of the last chunk, the average of overlapping chunks, and what the policy wrote to
`batch["memory"]`. Evaluation uses one session per environment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexor.core.batch import Batch
from flexor.core.errors import FlexorError
from flexor.core.log import warn_once
from flexor.core.rng import Noise
from flexor.policies.pretrained import Pretrained
from flexor.policies.processing.rename_and_move import renaming_of

Observation = Mapping[str, np.ndarray]


class TemporalEnsembler:
    """The average of all chunks that have an action for the current step (Algorithm 2 of the ACT paper).

    The weight of a chunk is exp(-coefficient * i), where i = 0 is the oldest. With running sums, a step costs one
    addition.
    """

    def __init__(self, coefficient: float, chunk_size: int):
        self.weights = np.exp(-coefficient * np.arange(chunk_size)).astype(np.float32)
        self.totals = self.weights.cumsum()
        self.sums: np.ndarray | None = None  # [H, A]
        self.counts = np.zeros(chunk_size, int)  # earlier chunks that have an action for step h

    def __call__(self, chunk: np.ndarray) -> np.ndarray:
        """A new chunk [H, A] -> the action [A] for now."""
        sums = np.zeros_like(chunk) if self.sums is None else self.sums
        sums = sums + self.weights[self.counts][:, None] * chunk
        action: np.ndarray = sums[0] / self.totals[self.counts[0]]
        # one step later: entry h + 1 becomes entry h, and no chunk reaches the last step yet
        self.sums = np.concatenate((sums[1:], np.zeros_like(sums[:1])))
        self.counts = np.append(self.counts[1:] + 1, 0)
        return action


class History:
    """The last observations, stacked along time as in training: [...] -> [T, ...].

    At the start of an episode the first observation is repeated, as in a training sample that begins before its
    episode. Future observations, which some policies use in training, are left out.
    """

    def __init__(self, deltas: list[int] | None):
        self.deltas = None if deltas is None else [step for step in deltas if step <= 0]
        self.observations: deque[Observation] = deque(maxlen=1 - min(self.deltas or [0]))

    def add(self, observation: Observation) -> None:
        self.observations.append(observation)

    def stacked(self) -> Observation:
        if self.deltas is None:
            return self.observations[-1]
        stack = [self.observations[max(0, len(self.observations) - 1 + step)] for step in self.deltas]
        return {name: np.stack([observation[name] for observation in stack]) for name in stack[-1]}


class Session:
    """One robot that a policy controls. Several sessions can share the policy."""

    def __init__(self, pretrained: Pretrained, seed: int = 0, episode: int = 0):
        self.pretrained, self.seed = pretrained, seed
        self.config = pretrained.policy.config
        self.renaming = renaming_of(pretrained.preprocessor)
        self.reset(episode)

    def reset(self, episode: int = 0) -> None:
        """Start a new episode. The policy's noise depends on its number: the same number gets the same noise."""
        self.episode, self.step = episode, 0
        self.history = History(self.config.observation_deltas)
        self.queue: deque[np.ndarray] = deque()  # actions [A] that are still to be executed
        self.memory: Batch = {}  # what the policy gets back at the next prediction
        coefficient = self.config.ensemble_coefficient
        self.ensembler = (
            None if coefficient is None else TemporalEnsembler(coefficient, len(self.config.action_deltas))
        )

    def act(self, observation: Observation, task: str = "") -> np.ndarray:
        """The action [A] for an observation, in the robot's units. Call it once for every step of the robot."""
        action: np.ndarray = act_together([self], [observation], [task])[0]
        return action

    def observe(self, observation: Observation, task: str) -> None:
        self._check(observation)
        self.history.add(observation)
        self.task = task

    def needs_chunk(self) -> bool:
        return self.ensembler is not None or not self.queue

    def add_chunk(self, chunk: np.ndarray) -> None:
        """Store a new chunk [H, A]."""
        if self.ensembler:
            self.queue.append(self.ensembler(chunk))
        else:
            self.queue.extend(chunk[: self.config.action_steps])

    def next_action(self) -> np.ndarray:
        self.step += 1
        return self.queue.popleft()

    def _check(self, observation: Observation) -> None:
        """The environment must provide the inputs that the policy was trained on, under its names or renamed ones."""
        renamed = {self.renaming.get(name, name): value for name, value in observation.items()}
        if len(renamed) < len(observation):
            twice = [
                f"{a} and {b}" for a, b in self.renaming.items() if {a, b} <= observation.keys() and a != b
            ]
            raise FlexorError(
                f"The environment provides both {', '.join(twice)}, which rename_map gives the same name: set "
                "--rename_map to the names of this environment, or to {}."
            )
        self._check_names(renamed.keys(), sorted(observation))
        for name, feature in self.config.observed.items():
            if name in renamed and not self.config.accepts_shape(name, renamed[name].shape):
                raise FlexorError(_wrong_shape(name, [*renamed[name].shape], [*feature.shape]))

    def _check_names(self, names: Collection[str], provided: Sequence[str]) -> None:
        missing = [name for name in self.config.observed if name not in names]
        if not self.config.can_act_without(missing):
            raise FlexorError(
                f"The policy needs {', '.join(missing)}, but the environment provides only {provided}. If it is there "
                f"under another name, give --rename_map='{{NAME: {missing[0]}}}'."
            )
        if missing:
            warn_once(
                "the policy acts without %s, which it was trained with: the environment provides only %s. If it is "
                "there under another name, give --rename_map='{NAME: %s}'",
                *(", ".join(missing), provided, missing[0]),
            )


@dataclass(frozen=True)
class Executing:
    """The chunk that a robot executes while the policy predicts the next one."""

    actions: np.ndarray
    """[K, A]: the rest of its last chunk, from the observation on."""
    delay: int
    """Number of these actions that the robot will have executed when it gets the new chunk."""


def act_together(
    sessions: Sequence[Session], observations: Sequence[Observation], tasks: Sequence[str]
) -> np.ndarray:
    """One action for each robot, [N, A]. The policy computes all chunks that are due in one batch."""
    for session, observation, task in zip(sessions, observations, tasks, strict=True):
        session.observe(observation, task)
    due = [session for session in sessions if session.needs_chunk()]
    for session, chunk in zip(due, predict_together(due, [session.history.stacked() for session in due])):
        session.add_chunk(chunk)
    return np.stack([session.next_action() for session in sessions])


def predict_together(
    sessions: Sequence[Session],
    observations: Sequence[Observation],
    executing: Sequence[Executing | None] | None = None,
    sizes: Sequence[int] = (),
) -> list[np.ndarray]:
    """The chunk [H, A] of each robot for its observation, in as few batches as possible. Their memory is updated.

    `sizes` are the allowed sizes of a batch: it is filled up to the next one. So a GPU needs few graphs.
    """
    chunks: dict[int, np.ndarray] = {}
    for rows in _same_shapes(sessions, observations):
        running = [executing[row] if executing else None for row in rows]
        batch_chunks = _predict_batch(
            [sessions[row] for row in rows], [observations[row] for row in rows], running, sizes
        )
        chunks.update(zip(rows, batch_chunks))
    return [chunks[row] for row in range(len(sessions))]


def _wrong_shape(name: str, shape: list[int], expected: list[int]) -> str:
    text = f"{name} has the shape {shape}, but the policy was trained on {expected}"
    if len(shape) == 3 and [shape[-1], *shape[:-1]] == expected:
        return f"{text}: the channels come first. Give image.transpose(2, 0, 1)."
    return f"{text}. Resize it, or set the size that the environment gives with --env.kwargs."


def _same_shapes(sessions: Sequence[Session], observations: Sequence[Observation]) -> Iterator[list[int]]:
    """The numbers of sessions that can share a batch: names and shapes of their observations and memories agree."""
    groups: dict[object, list[int]] = {}
    for row, (session, observation) in enumerate(zip(sessions, observations, strict=True)):
        shapes = (_shapes(observation), _shapes(session.memory))
        groups.setdefault((id(session.pretrained), session.seed, shapes), []).append(row)
    yield from groups.values()


def _shapes(values: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(value.shape)) for name, value in sorted(values.items()))


def _predict_batch(
    sessions: list[Session],
    observations: list[Observation],
    executing: list[Executing | None],
    sizes: Sequence[int],
) -> np.ndarray:
    """Predict the chunks of all sessions in one batch, [N, H, A]."""
    first, count = sessions[0], len(sessions)
    size = min((size for size in sizes if size >= count), default=count)
    rows = [*range(count), *([count - 1] * (size - count))]
    steps = [sessions[row].step for row in rows]
    memory: Batch = {name: torch.stack([sessions[row].memory[name] for row in rows]) for name in first.memory}
    running = [executing[row] for row in rows]
    continues = first.pretrained.policy.continues_chunks
    pinned = next(first.pretrained.policy.parameters()).is_cuda
    chunks = first.pretrained.chunk(
        {name: _stacked([observations[row][name] for row in rows], pinned) for name in observations[0]},
        [sessions[row].task for row in rows],
        # with fixed sizes, always one step per robot: else there were two graphs of each size
        Noise(
            first.seed,
            steps[0] if not sizes and len({*steps}) == 1 else steps,
            torch.tensor([sessions[row].episode for row in rows]),
        ),
        memory,
        **(_continued(first.pretrained, running) if continues else {}),
    )
    for name, value in memory.items():
        if not isinstance(value, Tensor) or len(value) != size:
            raise FlexorError(
                f"The policy wrote {value!r} to batch['memory'][{name!r}]: it must be a tensor whose first "
                f"dimension is the batch ({size})."
            )
    for row, session in enumerate(sessions):
        session.memory = {name: value[row] for name, value in memory.items()}
    return chunks[:count] if continues else _blended(first.pretrained, chunks[:count], running)


def _stacked(arrays: list[np.ndarray], pinned: bool) -> np.ndarray:
    """The arrays along a new first axis; the other axes keep their order in memory.

    `pinned`: in memory that a GPU reads directly. Otherwise torch would first copy it there, with all of its threads.
    """
    first = arrays[0]
    if not pinned:
        return np.stack(arrays)
    # from the outermost in memory
    axes = np.argsort([-abs(stride) for stride in first.strides], kind="stable")
    dtype = torch.from_numpy(np.empty(0, np.result_type(*arrays))).dtype
    pinned_buffer = torch.empty(
        (len(arrays), *(first.shape[axis] for axis in axes)), dtype=dtype, pin_memory=True
    )
    out = pinned_buffer.numpy().transpose(0, *(1 + np.argsort(axes)))
    return np.stack(arrays, out=out)


def _continued(pretrained: Pretrained, running: list[Executing | None]) -> dict[str, Any]:
    """Arguments of `Pretrained.chunk` for a policy that continues chunks; none if no robot has one."""
    if not any(running):
        return {}
    config = pretrained.policy.config
    length = len(config.action_deltas)  # fixed, so that a GPU needs few graphs
    previous = np.zeros((len(running), length, config.action.shape[0]), np.float32)
    remaining = [0 if robot is None else min(len(robot.actions), length) for robot in running]
    for row, robot in enumerate(running):
        if robot is not None:
            previous[row, : remaining[row]] = robot.actions[: remaining[row]]
            previous[row, remaining[row] :] = robot.actions[-1]  # of no effect, but ordinary values
    return {
        "previous": previous,
        "left": remaining,
        "delay": [0 if robot is None else robot.delay for robot in running],
    }


def _blended(pretrained: Pretrained, chunks: np.ndarray, running: list[Executing | None]) -> np.ndarray:
    """For a policy that can't continue a chunk: the new one fades in while the last one fades out."""
    for chunk, robot in zip(chunks, running):
        if robot is not None:
            overlap = min(len(robot.actions), len(chunk))
            weight = pretrained.guidance_weights(overlap, robot.delay).numpy()[:overlap, None]
            chunk[:overlap] = weight * robot.actions[:overlap] + (1 - weight) * chunk[:overlap]
    return chunks
