"""Batches for training: the order selects the samples, and threads decode and assemble them ahead of the loop.

Batch n of a run is a pure function of its settings, so only the step is saved. A resumed run starts its
loader at that step and gets the same batches as without the interruption, on any number of ranks.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from flexor.core.batch import ACTION, SAMPLE_WEIGHT, Batch
from flexor.data.dataset import Dataset
from flexor.data.format.windows import window_rows
from flexor.data.frames.decode_processes import DecodeProcesses
from flexor.data.frames.features import FeatureStore
from flexor.data.frames.slots import Pool
from flexor.data.loader.assemble import Batcher, HostSteps, to_tensors
from flexor.data.loader.decoded_frames import DecodedFrames
from flexor.data.loader.order_planner import OrderPlanner
from flexor.data.loader.prefetch import Prefetcher
from flexor.data.loader.step_groups import StepGroups
from flexor.data.loader.work_time import work_since
from flexor.data.mixture.mixed import MixedDataset
from flexor.data.order.mixed import MixedOrder
from flexor.data.order.order import SampleOrder, UniformOrder
from flexor.data.settings import OrderConfig
from flexor.data.video.decode import bytes_read

__all__ = ["Loader", "sample_rows", "to_tensors", "valid_steps", "weight_scale"]

PROBLEMS = ("bad_frames", "skipped_samples", "substituted_samples")
PREFETCH_BYTES = 256 << 20  # limit for assembled batches that wait; one is always allowed
PREFETCH_GROUPS = 8
GROUP_SAMPLES = 1024  # of steps that are handled together
GROUP_BYTES = 64 << 20  # of their images
AHEAD_SAMPLES = 16_384  # planned ahead, if the pool has room
LEAST_AHEAD = 2  # groups
DEFAULT_POOL = 1 << 30
PLANNED_SAMPLES = 1 << 18  # of an order that are looked at together
WEIGHT_EPSILON = 1e-6  # LeRobot's, added to a sum of weights


class DatasetProgress(NamedTuple):
    """How much of a dataset was used so far."""

    samples: int
    share: float  # of all samples
    epochs: float


class Loader:
    """Iterate over optimizer steps; each is a list of micro-batches of tensors on `device`.

    Without a device, images stay planes in host memory, as for a transfer to a GPU (see `to_gpu.Staged`).
    `host_steps` process each batch in the threads, before it goes to the device. With `in_processes`, videos are
    decoded by as many processes as there are workers.
    One process is one rank. Rank r of w reads the r-th of w equal slices of each global batch.
    """

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
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str | None = "cpu",
        order: SampleOrder | None = None,
        order_config: OrderConfig | None = None,
        pool_bytes: int = DEFAULT_POOL,
        on_bad_frame: str = "raise",
        tier: str = "stream",
        decoded_on_gpu: bool = False,
        in_processes: bool = False,
        host_steps: HostSteps | None = None,
    ):
        self.dataset, self.store = dataset, dataset.store
        self.deltas = {name: list(steps) for name, steps in deltas.items()}
        self.cameras = list(dataset.cameras if cameras is None else cameras)
        self.batch_size = batch_size
        self.accumulation = accumulation
        self.rank, self.world_size = rank, world_size
        self.rows = sample_rows(dataset, drop_last_frames)
        self.order = order or UniformOrder(len(self.rows), seed)
        assert self.order.size == len(self.rows), "the order belongs to another dataset"
        self.order_config = order_config or OrderConfig("uniform")  # how the order was chosen
        self.num_workers = num_workers
        self.device = None if device is None else torch.device(device)
        self.decoded_on_gpu, self.host_steps = decoded_on_gpu, host_steps
        self.in_processes = in_processes and num_workers > 0 and not decoded_on_gpu
        self.pool_bytes = pool_bytes
        self.pool = Pool(pool_bytes)
        self.on_bad_frame = on_bad_frame
        self.tier = tier
        self.before_copy: Callable[[], object] | None = None  # called when a step's batches are here
        self._counters: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()  # what `work` has reported
        self._syncing: threading.Thread | None = None

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.accumulation * self.world_size

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """The micro-batches of optimizer steps start ... stop - 1, prefetched by threads."""
        processes = DecodeProcesses(self.num_workers, self.store.places.memory) if self.in_processes else None
        memory = None if processes is None else processes.memory
        self.pool = Pool(self.pool_bytes, self.device if self.decoded_on_gpu else None, memory)
        frames = DecodedFrames(self.store, self.pool, self.cameras)
        groups = StepGroups(range(start, stop), self.grouped)
        batcher = Batcher(
            self.dataset,
            self.deltas,
            frames,
            batch_size=self.batch_size,
            device=self.device,
            host_steps=self.host_steps,
            on_bad_frame=self.on_bad_frame,
            jobs=self.num_workers,
            counters=self._counters,
            valid_steps=self._valid_steps,
            weight_scale=self._weight_scale,
            store=self.store,
        )
        feed: Prefetcher[list[list[Batch] | Exception]] = Prefetcher(
            self._planner(groups),
            self.store,
            frames,
            batcher.start,
            batcher.finish,
            threads=self.num_workers,
            prefetch=prefetched_groups(self.grouped * self._step_bytes),
            ahead=max(LEAST_AHEAD, AHEAD_SAMPLES // (self.grouped * self.batch_size * self.accumulation)),
            counters=self._counters,
            processes=processes,
        )
        with closing(feed.groups(groups.count)) as loaded:  # its threads end when this iterator is closed
            for batches in chain.from_iterable(loaded):
                if isinstance(batches, Exception):
                    raise batches
                self._counters["delivered"] += self.frames_per_sample * self.batch_size * self.accumulation
                if self.before_copy is not None:
                    self.before_copy()
                yield [batcher.to_device(batch) for batch in batches]

    def sync(self) -> None:
        """Flush cached frames to disk in the background, so that they survive a power failure."""
        if self._syncing is None or not self._syncing.is_alive():
            self._syncing = threading.Thread(target=self._sync, name="sync", daemon=True)
            self._syncing.start()

    def _sync(self) -> None:
        for cache in self.store.caches.values():
            cache.sync()

    def close(self) -> None:
        """Release cached frames; those on disk stay there."""
        self.dataset.store.repeats.tell(last=True)
        if self._syncing is not None:
            self._syncing.join()
        caches, self.store.caches = self.store.caches, {}
        for cache in caches.values():
            cache.close()

    def read_features(self, store: FeatureStore, tier: str) -> None:
        """From here on, batches have features of images instead of them, which are in `tier`. Before `steps`."""
        self.store, self.tier = store, f"features {tier}"
        self.decoded_on_gpu = self.in_processes = False

    def frames_read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """The distinct frames of each camera that optimizer steps start ... stop - 1 of all ranks read, ascending."""
        needed = np.zeros(len(self.rows), bool)
        stride = max(1, PLANNED_SAMPLES // self.global_batch)
        for first in range(start, stop, stride):
            steps = min(stop, first + stride) - first
            needed[self.order.samples(first * self.global_batch, steps * self.global_batch)] = True
            if needed.all():
                break
        return {camera: np.unique(ids) for camera, ids in self._frames(self.rows[needed]).items()}

    def progress(self, step: int) -> dict[str, DatasetProgress]:
        """How much of each dataset was used before a step; empty if there is only one."""
        if not isinstance(self.dataset, MixedDataset) or len(self.dataset.members) == 1:
            return {}
        assert isinstance(self.order, MixedOrder)
        position = step * self.global_batch
        names = self.dataset.names
        samples_used, samples_available = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        members = [part.member for part in self.dataset.parts()]
        for member, part, count in zip(members, self.order.parts, self.order.counts_before(position)):
            samples_used[names[member]] += count
            samples_available[names[member]] += len(part.samples)
        return {
            name: DatasetProgress(used, used / max(1, position), used / samples_available[name])
            for name, used in samples_used.items()
            if samples_available[name]
        }

    def problem_counts(self) -> dict[str, int]:
        """Counts of frames that could not be decoded, and of their samples; empty if there are none."""
        return {name: self._counters[name] for name in PROBLEMS if self._counters[name]}

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all its frames, decoded and raw: what a cache of them takes."""
        return len(self.dataset) * sum(self.dataset.store.format(camera).nbytes for camera in self.cameras)

    def work(self) -> dict[str, Any]:
        """What the threads have done since the last call, in thread seconds: a part of each line of the log."""
        now, before = Counter(self._counters), self._reported
        now["bytes"] = bytes_read()
        self._reported = now
        cache = "none" if self.tier == "stream" else self.tier
        about = {"threads": self.num_workers, "source": self.dataset.source_kind, "cache": cache}
        about["decode_in"] = "processes" if self.in_processes else "threads"
        return work_since(now, before) | about

    def counters(self) -> dict[str, Any]:
        """Frames and bytes read so far; CPU seconds of decoding and conversion; and seconds that decoding waited for
        files, and for the interpreter or a core."""
        count, store = self._counters, self.store
        return {
            **{name: count[name] for name in ("decoded", "delivered", "misses")},
            "hits": max(0, count["delivered"] - count["misses"]),
            **{name: count[name] for name in ("evictions", *PROBLEMS)},
            "bytes_read": bytes_read(),
            "pool_bytes": self.pool.used,
            "pool_peak_bytes": self.pool.peak,
            "cache_bytes": sum(
                cache.count * store.stored_format(name).nbytes for name, cache in store.caches.items()
            ),
            "decode_s": count["decode_us"] / 1e6,
            "convert_s": count["convert_us"] / 1e6,
            "read_s": count["read_s_us"] / 1e6,
            "decode_wait_s": max(0, count["decode_s_us"] - count["decode_cpu_s_us"]) / 1e6,
        }

    def _planner(self, groups: StepGroups) -> OrderPlanner:
        return OrderPlanner(
            self.order,
            self._frames,
            self.rows,
            groups=groups,
            rank=self.rank,
            share=self.batch_size * self.accumulation,
            global_batch=self.global_batch,
            cameras=self.cameras,
        )

    @cached_property
    def grouped(self) -> int:
        """Steps of a group, after the first ones."""
        limit = min(GROUP_BYTES, self.pool_bytes // 4)
        return steps_of_group(self.batch_size * self.accumulation, self._step_bytes, limit)

    def _frames(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """The frames of each camera's windows, [n, T]."""
        episodes, episode = self.dataset.episodes, self.dataset.episode_of(rows)
        offset = (episodes.first_frame - episodes.start)[episode][:, None]
        frames = {}
        for camera in self.cameras:
            steps = self.deltas.get(camera, [0])
            window, _ = window_rows(rows, steps, episodes.start[episode], episodes.end[episode])
            frames[camera] = self.store.image_ids(camera, window + offset)
        return frames

    def _rows_of(self, steps: range) -> np.ndarray:
        """The rows of all ranks, [steps, global batch]; in no particular order within a step."""
        selection = self.order.select(steps.start * self.global_batch, self.global_batch, len(steps))
        return self.rows[selection.sample.reshape(len(steps), -1)]

    def _valid_steps(self, steps: range) -> list[float] | None:
        if ACTION not in self.deltas:
            return None
        return valid_steps(self.dataset, self._rows_of(steps), self.deltas)

    def _weight_scale(self, step: int) -> float:
        (rows,) = self._rows_of(range(step, step + 1))
        return weight_scale(self.dataset.columns[SAMPLE_WEIGHT][rows])

    @property
    def frames_per_sample(self) -> int:
        """Images of all cameras."""
        return sum(len(self.deltas.get(camera, [0])) for camera in self.cameras)

    @cached_property
    def _step_bytes(self) -> int:
        """Of a step's images as RGB, at least 1."""
        formats = [(self.store.stored_format(c), len(self.deltas.get(c, [0]))) for c in self.cameras]
        pictures = sum(format.picture_bytes * steps for format, steps in formats)
        return max(1, pictures * self.batch_size * self.accumulation)


def steps_of_group(samples: int, nbytes: int, limit: int = GROUP_BYTES) -> int:
    """How many steps are handled together, if each has this many samples, with this many bytes of images."""
    return max(1, min(GROUP_SAMPLES // samples, limit // nbytes))


def prefetched_groups(nbytes: int) -> int:
    """How many groups of steps may wait for the loop, if each has this many bytes of images."""
    return max(1, min(PREFETCH_GROUPS, PREFETCH_BYTES // nbytes))


def weight_scale(weights: np.ndarray) -> float:
    """What weights in the loss are multiplied by, so that they have a mean of 1 over the rows that make up one loss, as
    in LeRobot. If all are 0, they stay 0."""
    return len(weights) / (float(weights.sum(dtype=np.float64)) + WEIGHT_EPSILON)


def valid_steps(dataset: Dataset, rows: np.ndarray, deltas: Mapping[str, Sequence[int]]) -> list[float]:
    """Mean number of unpadded actions per sample, for each of several losses: `rows` [losses, samples]."""
    episodes, episode = dataset.episodes, dataset.episode_of(rows)
    steps = np.sort(np.asarray(deltas[ACTION], np.int64))
    before_end = np.searchsorted(steps, episodes.end[episode] - rows)
    before_start = np.searchsorted(steps, episodes.start[episode] - rows)
    means: list[float] = (before_end - before_start).mean(1).tolist()
    return means


def sample_rows(dataset: Dataset, drop_last_frames: int) -> np.ndarray:
    """Rows that may start a sample: all except the last few of each episode."""
    episodes = dataset.episodes
    ends = np.maximum(episodes.start + 1, episodes.end - drop_last_frames)
    return np.concatenate([np.arange(start, end) for start, end in zip(episodes.start, ends)])
