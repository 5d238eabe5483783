"""The frames at which a policy is asked, and what was recorded from there on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flexor.core.batch import ACTION, STATE
from flexor.core.errors import ConfigError, FlexorError
from flexor.core.log import log
from flexor.data.check.paired_joints import paired_joints, value_names
from flexor.data.dataset import Dataset
from flexor.policies.base import PolicyConfig
from flexor.policies.rename import in_dataset

Observation = dict[str, np.ndarray]
IMAGE_BYTES = 1 << 30  # of all images in memory


@dataclass(frozen=True, eq=False)
class Samples:
    """Frames of several episodes. Names are the dataset's."""

    rows: np.ndarray  # [N] of the dataset
    episode: np.ndarray  # [N] number of the episode
    frame: np.ndarray  # [N] within its episode
    observation: Observation  # [N, (T,) ...] for the policy
    task: list[str]
    actions: np.ndarray  # float64 [N, H, A] recorded
    valid: np.ndarray  # [N, H] False beyond the end of the episode
    previous: np.ndarray  # float64 [N, A] the action of the frame before; the first one where there is none
    joints: list[str]  # names of the actions
    states: list[str]  # names of the state's values
    cameras: list[str]
    colour: list[str]  # cameras that are no depth maps

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def state_name(self) -> str | None:
        return STATE if STATE in self.observation else None

    @cached_property
    def state(self) -> np.ndarray | None:
        """The state now, float64 [N, S]."""
        if self.state_name is None:
            return None
        values = self.observation[self.state_name].astype(np.float64)
        return values[:, -1] if values.ndim == 3 else values

    @cached_property
    def state_of_joint(self) -> list[int | None]:
        """For each action the value of the state that measures the same joint."""
        return paired_joints(self.joints, self.states)


def spread_rows(dataset: Dataset, count: int) -> np.ndarray:
    """About `count` rows: as many of each episode, at equal distances."""
    lengths = dataset.episodes.length
    each = max(1, count // len(lengths))
    episodes = np.arange(len(lengths))
    if len(lengths) > count:
        episodes = np.unique(np.linspace(0, len(lengths) - 1, count).round().astype(int))
    rows = []
    for episode in episodes.tolist():
        length = int(lengths[episode])
        places = (np.arange(min(each, length)) + 0.5) * length / min(each, length)
        rows.append(dataset.episodes.start[episode] + places.astype(int))
    return np.concatenate(rows)


def needed_names(config: PolicyConfig, dataset: Dataset, rename_map: Mapping[str, str]) -> list[str]:
    """The dataset's names of the policy's inputs. One that the dataset lacks is an error, unless the policy copes."""
    names = dict(zip(in_dataset(config.observed, rename_map), config.observed))
    missing = [target for name, target in names.items() if name not in dataset.features]
    if not config.can_act_without(missing):
        raise FlexorError(
            f"The policy needs {', '.join(missing)}, but {dataset.repo_id} has only {', '.join(dataset.features)}. If "
            f"it is there under another name, give --rename_map='{{NAME: {missing[0]}}}'."
        )
    if missing:
        log.warning("%s has no %s: the policy acts without", dataset.repo_id, ", ".join(missing))
    return [name for name in names if name in dataset.features]


def read_samples(
    dataset: Dataset, config: PolicyConfig, rename_map: Mapping[str, str], horizon: int, count: int
) -> Samples:
    """`count` frames of the dataset's episodes, with `horizon` actions each."""
    if ACTION not in dataset.columns:
        raise ConfigError(f"{dataset.repo_id} has no column {ACTION!r} to compare with.")
    names = needed_names(config, dataset, rename_map)
    cameras = [name for name in dataset.cameras if name in names]
    rows = spread_rows(dataset, _affordable(dataset, config, cameras, count))
    past = [step for step in config.observation_deltas or [] if step <= 0]
    deltas: dict[str, Sequence[int]] = (
        dict.fromkeys(names, past) if config.observation_deltas is not None else {}
    )
    batch = dataset.read(rows, {**deltas, ACTION: range(horizon)}, cameras)
    actions = batch[ACTION].astype(np.float64).reshape(len(rows), horizon, -1)
    position = dataset.episode_of(rows)
    start = dataset.episodes.start[position]
    before = dataset.columns[ACTION][np.maximum(rows - 1, start)].astype(np.float64)
    if actions.shape[2:] != config.action.shape:
        raise FlexorError(
            f"{ACTION} is {list(actions.shape[2:])} in {dataset.repo_id}, but {list(config.action.shape)} in the "
            "policy: name a dataset of the same robot."
        )
    return Samples(
        rows=rows,
        episode=dataset.episodes.index[position],
        frame=rows - start,
        observation={name: batch[name] for name in names},
        task=batch["task"],
        actions=actions,
        valid=~batch[f"{ACTION}_is_pad"],
        previous=before.reshape(len(rows), -1),
        joints=value_names(dataset, ACTION),
        states=value_names(dataset, STATE),
        cameras=cameras,
        colour=[name for name in cameras if dataset.features[name].depth is None],
    )


def _affordable(dataset: Dataset, config: PolicyConfig, cameras: Sequence[str], count: int) -> int:
    """So many samples that their images fit into memory."""
    size = sum(int(np.prod(dataset.features[name].chw)) for name in cameras) * config.n_obs_steps
    return max(1, min(count, IMAGE_BYTES // size)) if size else count
