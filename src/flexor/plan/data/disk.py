"""Disk that a run takes: the dataset, the frames that are kept of it, and checkpoints as they come and go."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexor.data.settings import CacheConfig
from flexor.plan.data.host import Data, Loading


@dataclass(frozen=True)
class Kept:
    """How many checkpoints there are: written in all, at most at a time, and in the end."""

    written: int
    most: int
    final: int


def checkpoints_kept(steps: int, save_freq: int, keep_last: int | None, keep_every: int | None) -> Kept:
    """A checkpoint is whole before an older one goes, so one more than are kept has to fit."""
    written = 1 if save_freq <= 0 else -(-steps // save_freq)

    def left(saved: int) -> int:
        if keep_last is None or saved <= keep_last:
            return saved
        always = 0
        if keep_every and save_freq > 0:
            always = (saved - keep_last) * save_freq // math.lcm(save_freq, keep_every)
        return keep_last + always

    return Kept(written, left(written - 1) + 1, left(written))


def checkpoint_bytes(
    weights: int,
    optimizer: int,
    *,
    ema: bool = False,
    lora: bool = False,
    sharded: bool = False,
    export: bool = True,
) -> int:
    """One checkpoint. `weights`, `optimizer`: bytes of the whole state, over all ranks.

    Whole: the weights to act with and the optimizer. If those that act are an average or have adapters merged into
    them, the raw weights too, and the average. Sharded: all of that once, and the weights to act with beside it.
    """
    state = optimizer + weights * (2 if ema else 1)
    if sharded:
        return state + (weights if export else 0)
    return state + (weights if ema or lora else 0)


@dataclass(frozen=True)
class Disk:
    """Bytes on disk, at most."""

    dataset: int
    cache: int
    checkpoints: int

    @property
    def total(self) -> int:
        return self.dataset + self.cache + self.checkpoints


def disk_needed(data: Data, loading: Loading, cache: CacheConfig, checkpoint: int, kept: Kept) -> Disk:
    """Dataset, kept frames and checkpoints of `checkpoint` bytes each."""
    frames = data.scaled(cache).kept_bytes(cache, not loading.gpu) if loading.tier == "disk" else 0
    return Disk(data.file_bytes, frames, checkpoint * kept.most)
