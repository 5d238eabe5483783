"""What a robot could do without a policy: hold still, repeat its last action, or do what is usual in the task."""

from __future__ import annotations

import numpy as np

from flexor.core.batch import ACTION, STATE
from flexor.data.check.action_kind import ABSOLUTE, ActionKind, find_action_kind
from flexor.data.dataset import Dataset
from flexor.evaluate.open_loop.samples import Samples

HOLD, REPEAT, MEAN = "hold still", "repeat the last action", "mean of the task"


def action_kind(dataset: Dataset, samples: Samples) -> ActionKind | None:
    """Told from all rows of the dataset."""
    if STATE not in dataset.columns:
        return None
    actions, states = (dataset.columns[name].reshape(len(dataset), -1) for name in (ACTION, STATE))
    return find_action_kind(actions, states, dataset.episodes.start, samples.state_of_joint)


def predict_baselines(reference: Dataset, samples: Samples, kind: ActionKind | None) -> dict[str, np.ndarray]:
    """The actions of each baseline, [N, H, A]. Means are those of the dataset `reference`."""
    horizon = samples.actions.shape[1]
    return {
        name: np.repeat(actions[:, None], horizon, axis=1)
        for name, actions in (
            (HOLD, _hold(samples, kind)),
            (REPEAT, samples.previous),
            (MEAN, _mean_of_task(reference, samples)),
        )
    }


def _hold(samples: Samples, kind: ActionKind | None) -> np.ndarray:
    """Actions [N, A] that keep the joints where they are."""
    if kind is not None and kind.name != ABSOLUTE:
        return np.zeros_like(samples.previous)
    actions = samples.previous.copy()
    for joint, value in enumerate(samples.state_of_joint):
        if value is not None and samples.state is not None:
            actions[:, joint] = samples.state[:, value]
    return actions


def _mean_of_task(reference: Dataset, samples: Samples) -> np.ndarray:
    """The mean action [N, A] of each sample's task, or of all tasks if the dataset does not have it."""
    actions = reference.columns[ACTION].reshape(len(reference), -1)
    numbers = reference.columns["task_index"]
    usual = np.nanmean(actions, axis=0, dtype=np.float64)
    means = {
        reference.tasks[number]: np.nanmean(actions[numbers == number], axis=0, dtype=np.float64)
        for number in np.unique(numbers).tolist()
        if 0 <= number < len(reference.tasks)
    }
    return np.stack([means.get(task, usual) for task in samples.task])
