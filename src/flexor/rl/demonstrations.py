"""Demonstrations of a LeRobot dataset as records: what the policy observed, what was done, and the reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flexor.core.batch import ACTION, REWARD
from flexor.core.errors import ConfigError
from flexor.data.dataset import Dataset
from flexor.policies.features import PolicyFeature
from flexor.rl.records import first_record, step_record

DONE, SUCCESS = "next.done", "next.success"
PENALTY = "complementary_info.discrete_penalty"  # LeRobot's name


def demonstration_records(
    dataset: Dataset, observed: Mapping[str, PolicyFeature], layout: np.dtype[Any], reward: str
) -> np.ndarray:
    """The records of all episodes. `reward`: where rewards come from, as in `rl.reward`."""
    _check(dataset, observed, layout, reward)
    cameras = [name for name in observed if name in dataset.cameras]
    records: list[np.ndarray] = []
    for start, end in zip(dataset.episodes.start, dataset.episodes.end):
        frames = dataset.read(np.arange(start, end), cameras=cameras)
        records += _episode(frames, layout, reward, dataset.repo_id, int(start))
    return np.concatenate(records) if records else np.zeros(0, layout)


def _episode(
    frames: Mapping[str, Any], layout: np.dtype[Any], reward: str, name: str, row: int
) -> list[np.ndarray]:
    """A frame has the observation before its action. Of the last one nothing follows, unless it ends the task."""
    rewards, done = _outcome(frames, reward, name, row)
    records = [first_record(layout, _at(frames, layout, 0))]
    for step, (value, ends) in enumerate(zip(rewards, done)):
        follows = step + 1 < len(rewards)
        if not (follows or ends):
            break  # what followed was not recorded
        observation = _at(frames, layout, step + 1 if follows else step)  # at the end it does not count
        outcome = {"reward": float(value), "terminated": float(ends)}
        if PENALTY in frames:
            outcome["penalty"] = float(np.asarray(frames[PENALTY][step]).reshape(-1)[0])
        records.append(step_record(layout, observation, frames[ACTION][step], **outcome))
        if ends:
            break
    return records


def _at(frames: Mapping[str, Any], layout: np.dtype[Any], step: int) -> dict[str, np.ndarray]:
    assert layout.names is not None
    return {name: frames[name][step] for name in layout.names if name.startswith("observation.")}


def _outcome(frames: Mapping[str, Any], reward: str, name: str, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Reward and end of each step of an episode."""
    count = len(frames[ACTION])
    if reward == "recorded":
        return frames[REWARD].reshape(count), frames[DONE].reshape(count).astype(bool)
    ends = np.zeros(count, bool)
    if reward == "last":
        ends[-1] = True
    else:
        successes = np.flatnonzero(frames[SUCCESS].reshape(count))
        if not len(successes):
            raise ConfigError(
                f"{name}: the episode at row {row} has no step with {SUCCESS}, so rl.reward=success finds no reward in "
                "it. Leave it out with --dataset.exclude_episodes."
            )
        ends[successes[0]] = True
    return ends.astype(np.float32), ends


def _check(
    dataset: Dataset, observed: Mapping[str, PolicyFeature], layout: np.dtype[Any], reward: str
) -> None:
    """Refuse a dataset whose episodes can't be demonstrations of this task."""
    columns = {"recorded": (REWARD, DONE), "success": (SUCCESS,), "last": ()}[reward]
    for name in columns:
        if name not in dataset.columns:
            raise ConfigError(
                f"{dataset.repo_id} has no column {name!r}, which rl.reward={reward} reads. If all its episodes end "
                "with success, use --rl.reward=last."
            )
    for name, feature in observed.items():
        declared = dataset.features.get(name)
        shape = None if declared is None else tuple(declared.chw if declared.is_camera else declared.shape)
        if shape != feature.shape:
            difference = "has no such feature" if shape is None else f"has it with the shape {list(shape)}"
            raise ConfigError(
                f"The policy observes {name} {list(feature.shape)}, but {dataset.repo_id} {difference}. Record "
                "demonstrations with what the environment gives, or choose what the policy observes with "
                "--policy.input_features."
            )
    actions = tuple(dataset.features[ACTION].shape)
    if actions != layout["action"].shape:
        raise ConfigError(
            f"The environment takes actions of {list(layout['action'].shape)} numbers, but those of {dataset.repo_id} "
            f"have {list(actions)}."
        )
