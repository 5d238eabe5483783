"""Batches for training: the order says which samples, threads read them ahead of the loop.

Batch n of a run is a pure function of its settings, so there is nothing to save but the step: a
resumed run starts its loader at that step and gets the batches it would have got.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from flexor.batch import ACTION, VALID_STEPS, Batch
from flexor.data.dataset import Dataset
from flexor.data.order import UniformOrder
from flexor.data.windows import window_rows

READ_AHEAD = 2  # optimizer steps per worker thread


class Loader:
    """Iterate over optimizer steps; each is a list of micro-batches of tensors on the CPU."""

    def __init__(
        self,
        dataset: Dataset,
        deltas: Mapping[str, Sequence[int]],
        *,
        cameras: Sequence[str] | None = None,
        batch_size: int,
        accumulation: int = 1,
        seed: int = 0,
        drop_last_frames: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ):
        self.dataset = dataset
        self.deltas = dict(deltas)
        self.cameras = cameras  # those the policy looks at; all unless given
        self.batch_size = batch_size
        self.accumulation = accumulation
        self.rows = sample_rows(dataset, drop_last_frames)
        self.order = UniformOrder(len(self.rows), seed)
        self.num_workers = num_workers
        self.pin_memory = pin_memory

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.accumulation

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """The micro-batches of optimizer steps start ... stop - 1, read ahead by threads."""
        if self.num_workers == 0:
            yield from map(self.read_step, range(start, stop))
            return
        with ThreadPoolExecutor(self.num_workers, thread_name_prefix="loader") as pool:
            pending: deque[Future[list[Batch]]] = deque()
            try:
                for step in range(start, stop):
                    pending.append(pool.submit(self.read_step, step))
                    if len(pending) > READ_AHEAD * self.num_workers:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                for future in pending:
                    future.cancel()

    def read_step(self, step: int) -> list[Batch]:
        """The micro-batches of one optimizer step."""
        samples = self.order.samples(step * self.global_batch, self.global_batch)
        rows = self.rows[samples]
        valid = valid_steps(self.dataset, rows, self.deltas)
        batches = []
        for part in np.split(rows, self.accumulation):
            batch = to_tensors(self.dataset.read(part, self.deltas, self.cameras), self.pin_memory)
            if valid is not None:
                batch[VALID_STEPS] = valid
            batches.append(batch)
        return batches


def valid_steps(dataset: Dataset, rows: np.ndarray, deltas: Mapping[str, Sequence[int]]) -> float | None:
    """Mean number of unpadded actions per sample over all rows that make up one loss."""
    if ACTION not in deltas:
        return None
    episodes, which = dataset.episodes, dataset.episode_of(rows)
    _, is_pad = window_rows(rows, deltas[ACTION], episodes.start[which], episodes.end[which])
    return float((~is_pad).sum(1).mean())


def sample_rows(dataset: Dataset, drop_last_frames: int) -> np.ndarray:
    """Rows that may start a sample: all but the last few of each episode."""
    episodes = dataset.episodes
    ends = np.maximum(episodes.start + 1, episodes.end - drop_last_frames)
    return np.concatenate([np.arange(start, end) for start, end in zip(episodes.start, ends)])


def to_tensors(batch: Mapping[str, Any], pin_memory: bool = False) -> Batch:
    """numpy arrays as tensors (in pinned memory for a GPU); everything else as it is."""
    out: Batch = {}
    for key, value in batch.items():
        if isinstance(value, np.ndarray) and value.dtype != object:
            value = torch.from_numpy(value)
            if pin_memory:
                value = value.pin_memory()
        out[key] = value
    return out
