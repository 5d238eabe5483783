"""Disk space for a run: the dataset, its cached frames, and checkpoints as they are written and removed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexor.data.settings import CacheConfig
from flexor.plan.data.host import Data, Loading
from flexor.plan.trace.events import SavedWeights


@dataclass(frozen=True)
class CheckpointCounts:
    """Numbers of checkpoints: written in total, on disk at most at the same time, and left at the end."""

    written: int
    most: int
    final: int


def checkpoints_kept(
    steps: int, save_freq: int, keep_last: int | None, keep_every: int | None
) -> CheckpointCounts:
    """A new checkpoint is complete before an old one is removed, so there must be space for one more than are kept."""
    written = 1 if save_freq <= 0 else -(-steps // save_freq)

    def left(saved: int) -> int:
        if keep_last is None or saved <= keep_last:
            return saved
        always = 0
        if keep_every and save_freq > 0:
            always = (saved - keep_last) * save_freq // math.lcm(save_freq, keep_every)
        return keep_last + always

    return CheckpointCounts(written, left(written - 1) + 1, left(written))


def checkpoint_bytes(
    weights: SavedWeights, optimizer: int, *, lora: bool = False, sharded: bool = False, export: bool = True
) -> int:
    """Bytes of one checkpoint, over all ranks.

    Not sharded: the weights for inference and the optimizer state. If the weights for inference are a moving average
    or have merged adapters, also the raw weights, and the average. Sharded: the whole state once, and with `export`
    the weights for inference.
    """
    exported = weights.exported + weights.adapters
    if sharded:
        return optimizer + weights.raw + weights.average + (exported if export else 0)
    raw = weights.raw if weights.average or lora else 0
    return optimizer + raw + weights.average + exported


@dataclass(frozen=True)
class Disk:
    """Maximum bytes on disk."""

    dataset: int
    cache: int
    checkpoints: int
    features: int = 0
    """Of images, for this run and later ones."""

    @property
    def total(self) -> int:
        return self.dataset + self.cache + self.checkpoints + self.features


def disk_needed(
    data: Data,
    loading: Loading,
    cache: CacheConfig,
    checkpoint: int,
    counts: CheckpointCounts,
    features: int = 0,
) -> Disk:
    """Dataset, cached frames or features, and checkpoints of `checkpoint` bytes each."""
    frames = data.scaled(cache).cache_bytes(cache, not loading.gpu) if loading.tier == "disk" else 0
    return Disk(data.file_bytes, frames, checkpoint * counts.most, features)
