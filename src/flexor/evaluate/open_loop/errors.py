"""Errors of predictions: in the robot's units, and as one score over all joints, by which predictions are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 500
SMALLEST_MOTION = 1e-6  # of the largest value: a joint whose actions vary less does not count


@dataclass(frozen=True, eq=False)
class Target:
    """The recorded actions that predictions are compared with."""

    actions: np.ndarray  # [N, H, A]
    valid: np.ndarray  # [N, H]
    scale: np.ndarray  # [A] standard deviation of each action in the dataset; 0 if it does not move

    def joint_errors(self, predicted: np.ndarray) -> np.ndarray:
        """Mean absolute error of each joint, in its unit. [A]"""
        return _mean(np.abs(predicted - self.actions), self.valid[..., None], (0, 1))

    def step_errors(self, predicted: np.ndarray) -> np.ndarray:
        """Mean absolute error of each joint at each step of the chunk, in its unit. [H, A]"""
        return _mean(np.abs(predicted - self.actions), self.valid[..., None], (0,))

    def sample_scores(self, predicted: np.ndarray, joints: Sequence[int] = ()) -> np.ndarray:
        """The mean absolute error of each sample over some joints (default: all that move), in standard deviations of
        their actions. [N]"""
        return self._scaled_mean(predicted - self.actions, joints)

    def score(self, predicted: np.ndarray) -> float:
        return float(np.nanmean(self.sample_scores(predicted)))

    def distance(self, first: np.ndarray, second: np.ndarray) -> float:
        """How far apart two predictions are, in the unit of `score`."""
        return float(np.nanmean(self._scaled_mean(first - second)))

    def part(self, places: np.ndarray, steps: np.ndarray) -> Target:
        """Some samples, and some steps of their chunks."""
        grid = np.ix_(places, steps)
        return Target(self.actions[grid], self.valid[grid], self.scale)

    def _scaled_mean(self, difference: np.ndarray, joints: Sequence[int] = ()) -> np.ndarray:
        moving = [joint for joint in joints or range(len(self.scale)) if self.scale[joint] > 0]
        if not moving:
            return np.zeros(len(difference))
        return _mean(np.abs(difference[..., moving]) / self.scale[moving], self.valid[..., None], (1, 2))


def _mean(values: np.ndarray, valid: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The mean of valid values; nan where there is none."""
    counted = np.broadcast_to(valid & np.isfinite(values), values.shape)
    with np.errstate(invalid="ignore"):
        mean: np.ndarray = np.where(counted, values, 0.0).sum(axes) / counted.sum(axes)
    return mean


def scale_of(actions: np.ndarray) -> np.ndarray:
    """The standard deviation of each action of [N, A]; 0 where it rests."""
    deviation = np.nanstd(actions, axis=0, dtype=np.float64)
    largest = np.nanmax(np.abs(actions), axis=0, initial=0.0)
    return np.where(deviation > SMALLEST_MOTION * np.maximum(largest, 1e-3), deviation, 0.0)


@dataclass(frozen=True)
class ErrorChange:
    """How an error changes from one prediction to another, in shares of the first: -0.5 is half of it."""

    mean: float
    low: float  # 95 % interval, by resampling episodes
    high: float

    @property
    def falls(self) -> bool:
        return self.high < 0

    @property
    def rises(self) -> bool:
        return self.low > 0


def compare(before: np.ndarray, after: np.ndarray, episode: np.ndarray) -> ErrorChange:
    """The change from scores `before` [N] to `after` [N] of samples in these episodes [N]."""
    groups = _sums(before, after, episode)
    rng = np.random.default_rng(0)
    picks = rng.integers(len(groups), size=(RESAMPLES, len(groups)))
    first, second = np.moveaxis(groups[picks].sum(1), -1, 0)
    ratios = second / np.maximum(first, 1e-12) - 1
    total = groups.sum(0)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return ErrorChange(float(total[1] / max(total[0], 1e-12) - 1), float(low), float(high))


def _sums(before: np.ndarray, after: np.ndarray, episode: np.ndarray) -> np.ndarray:
    """Sums of both by episode, [E, 2]; by sample if there are few episodes."""
    finite = np.isfinite(before) & np.isfinite(after)
    pairs = np.stack([before[finite], after[finite]], axis=1)
    names, place = np.unique(episode[finite], return_inverse=True)
    if len(names) < 4:
        return pairs
    sums = np.zeros((len(names), 2))
    np.add.at(sums, place, pairs)
    return sums


def correlation(predicted: np.ndarray, recorded: np.ndarray, valid: np.ndarray) -> float:
    """Of two [N, H], over all valid steps; 0 if one does not vary."""
    a, b = predicted[valid], recorded[valid]
    if len(a) < 3 or a.std() == 0 or b.std() == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])
