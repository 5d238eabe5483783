"""Measures how well an order shuffles, compared with random batches from the whole dataset.

A batch is less useful if its samples are similar. In robot data, frames of one episode are similar, and
frames close in time most of all. So this module counts those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flexor.data.order.order import SampleOrder

__all__ = ["Quality", "shuffle_quality"]

NEAR_S = 2.0
"""Frames of one episode less than this many seconds apart are near-duplicates."""


@dataclass(frozen=True)
class Quality:
    """Means over batches, each with its expected value for uniformly drawn batches."""

    batch: int
    episodes: float  # distinct episodes in a batch
    episodes_uniform: float
    near: float  # pairs of near-duplicates in a batch
    near_uniform: float
    near_next: float  # pairs of near-duplicates between a batch and the next
    near_next_uniform: float
    correlation: float  # of the sample indices of neighbours in a batch; uniform: 0

    @property
    def effective_batch(self) -> float:
        """The size of a uniform batch with equally noisy gradients, if near-duplicates had equal gradients.

        The variance of a mean of B samples with P equal pairs is (1 + 2 P / B) times that of B independent
        samples. Real near-duplicates are not equal, so this is a lower bound.
        """
        return self.batch / (1 + 2 * max(0.0, self.near - self.near_uniform) / self.batch)

    def __str__(self) -> str:
        return (
            f"{self.episodes:.1f} episodes in a batch of {self.batch} (uniform: {self.episodes_uniform:.1f}), "
            f"{self.near:.1f} pairs under {NEAR_S:g} s apart (uniform: {self.near_uniform:.1f}), "
            f"{self.near_next:.1f} with the next batch (uniform: {self.near_next_uniform:.1f})"
        )


def shuffle_quality(
    order: SampleOrder,
    episode_of_sample: np.ndarray,
    row_of_sample: np.ndarray,
    batch: int,
    fps: float,
    batches: int = 50,
) -> Quality:
    """Measure `batches` global batches spread over the first epoch."""
    assert order.size == len(episode_of_sample) == len(row_of_sample)
    # Integers whose distance is the distance of rows within an episode, and larger between episodes.
    near = math.ceil(NEAR_S * fps)
    episode = np.asarray(episode_of_sample, np.int64)
    row = np.asarray(row_of_sample, np.int64)
    time = episode * (int(row.max()) + near + 1) + row

    last = max(0, order.size // batch - 2)
    steps = np.unique(np.linspace(0, last, batches).astype(np.int64)).tolist()
    batch_samples = np.stack([order.samples(step * batch, batch) for step in steps])  # [steps, batch]
    next_samples = np.stack([order.samples((step + 1) * batch, batch) for step in steps])
    within = np.array([_near_pairs(times, near) for times in time[batch_samples]])
    within_next = np.array([_near_pairs(times, near) for times in time[next_samples]])
    both = np.array([_near_pairs(times, near) for times in time[np.hstack([batch_samples, next_samples])]])
    # The probability that two samples drawn without replacement are near-duplicates.
    chance = 2 * _near_pairs(time, near) / max(1, order.size * (order.size - 1))
    return Quality(
        batch=batch,
        episodes=float(np.mean([len(np.unique(row)) for row in episode[batch_samples]])),
        episodes_uniform=_expected_episodes(np.unique(episode, return_counts=True)[1], batch),
        near=float(within.mean()),
        near_uniform=chance * batch * (batch - 1) / 2,
        near_next=float((both - within - within_next).mean()),
        near_next_uniform=chance * batch**2,
        correlation=_correlation(batch_samples[:, :-1].ravel(), batch_samples[:, 1:].ravel()),
    )


def _near_pairs(times: np.ndarray, near: int) -> int:
    times = np.sort(times)
    return int((np.searchsorted(times, times + near) - np.arange(1, len(times) + 1)).sum())


def _expected_episodes(lengths: np.ndarray, batch: int) -> float:
    """Distinct episodes in a batch drawn without replacement (hypergeometric)."""
    size = int(lengths.sum())
    batch = min(batch, size)

    def log_ways(population: int) -> float:
        return math.lgamma(population + 1) - math.lgamma(population - batch + 1)

    distinct, frequency = np.unique(lengths, return_counts=True)
    sizes = [size - n for n in distinct.tolist()]
    absent = [math.exp(log_ways(n) - log_ways(size)) if n >= batch else 0.0 for n in sizes]
    return float(sum(frequency * (1 - np.array(absent))))


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    if len(x) < 2 or not x.std() or not y.std():
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])
