"""Moves the images of a batch to a GPU: each distinct frame is transferred once, as planes.

Frames may come from host memory, from GPU slots that NVDEC decoded into, or from the GPU's frame cache. The GPU
converts them to RGB, and gathers windows that share frames.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from flexor.data.frames.features import FeatureFormat
from flexor.data.frames.gpu_cache import GPUFrameCache
from flexor.data.frames.slots import Buffers
from flexor.data.frames.store import FrameStore, StoredFormat
from flexor.data.loader.step_frames import StepFrames
from flexor.data.video.on_device import rgb_on_device
from flexor.data.video.planes import PlaneFormat

Job = Callable[[], None]
HOST, DECODED, CACHED = range(3)  # where a frame is: in host memory, in a slot of the GPU, in the GPU's cache
COPY_BYTES = 4 << 20  # least bytes that are worth a job of their own


@dataclass(eq=False)
class Staged:
    """One camera's images of a batch. The distinct frames are those of `host`, `decoded` and `cached_rows`, in order.

    What will be transferred is in pinned memory: from other memory, the copy would wait for the GPU.
    """

    format: StoredFormat
    index: Tensor  # int64 [b] or [b, T] index of the distinct frame
    host: Tensor  # uint8 [h, nbytes]
    decoded: Tensor | None = None  # uint8 [d, nbytes], on the GPU
    gpu_cache: GPUFrameCache | None = None
    cached_rows: Tensor | None = None  # int64 [k] rows of the GPU's frame cache

    def on(self, device: torch.device) -> Tensor:
        """RGB uint8 [b, (T,) C, H, W] on the device, depths float32, or features [b, (T,) ...]."""
        parts = [self.host.to(device, non_blocking=True)] if len(self.host) else []
        if self.decoded is not None:
            parts.append(self.decoded)
        if self.gpu_cache is not None and self.cached_rows is not None:
            parts.append(self.gpu_cache.planes[self.cached_rows.to(device, non_blocking=True)])
        planes = parts[0] if len(parts) == 1 else torch.cat(parts)
        return _as_tensors(self.format, planes)[self.index.to(device, non_blocking=True)]


class Stager:
    """Fills `Staged` images; without a stream they stay in host memory."""

    def __init__(self, store: FrameStore, stream: torch.cuda.Stream | None, jobs: int):
        self.store, self.stream, self.jobs = store, stream, jobs
        self.buffers = Buffers()

    def stage(self, frames: StepFrames, batch_size: int) -> tuple[list[Staged], list[Job]]:
        """The images of each batch of a group, and the jobs that fill them in."""
        gpu_cache = self.store.caches.get(frames.camera)
        gpu_cache = gpu_cache if isinstance(gpu_cache, GPUFrameCache) else None
        places, index = self._distinct(frames, batch_size)
        kinds = self._kinds(frames, places, HOST if gpu_cache is None else CACHED)
        if kinds.any():  # batch by batch, in each of them kind by kind
            order = np.lexsort((kinds, places[:, 0] // batch_size))
            places, kinds, index = places[order], kinds[order], np.argsort(order)[index]
        batches = np.arange(len(frames.ids) // batch_size)
        edges = np.searchsorted(places[:, 0] // batch_size, [*batches, len(batches)])
        index = index - np.repeat(edges[:-1], batch_size)[:, None]
        format, host_places = self.store.stored_format(frames.camera), places[kinds == HOST]
        rows = len(host_places)
        # the maximum size, so that the next group can reuse it
        memory = self._memory(index.size, format.nbytes) if rows else torch.empty((0, 0), dtype=torch.uint8)
        jobs: list[Job] = [
            partial(self._copy, frames, host_places[some], memory[some].numpy())
            for some in self._parts(frames.camera, rows)
        ]
        host_edges = np.searchsorted(host_places[:, 0] // batch_size, [*batches, len(batches)])
        all_staged = []
        for batch, rows_of_batch in zip(batches.tolist(), self._pinned(index).split(batch_size)):
            staged = Staged(format, rows_of_batch, memory[host_edges[batch] : host_edges[batch + 1]])
            all_staged.append(staged)
            if rows < len(places):
                part = slice(edges[batch], edges[batch + 1])
                jobs += self._on_gpu(frames, places[part], kinds[part], staged, gpu_cache)
        return all_staged, jobs

    def _on_gpu(
        self,
        frames: StepFrames,
        places: np.ndarray,
        kinds: np.ndarray,
        staged: Staged,
        gpu_cache: GPUFrameCache | None,
    ) -> list[Job]:
        """Jobs for the frames of a batch that are on the GPU already."""
        decoded, cached = places[kinds == DECODED], places[kinds == CACHED]
        if len(cached):
            assert gpu_cache is not None
            staged.gpu_cache = gpu_cache
            staged.cached_rows = self._pinned(gpu_cache.rows(frames.ids[tuple(cached.T)]))
        return [partial(self._gather, frames, decoded, staged)] if len(decoded) else []

    def _distinct(self, frames: StepFrames, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """A position (sample, step) of each distinct frame of each batch [n, 2], and the frame of each position [b, T].

        Each replacement counts as a frame of its own."""
        ids = frames.ids.copy()
        for number, (i, t) in enumerate(frames.replacements):
            ids[i, t] = -1 - number
        low, high = ids.min(initial=0), ids.max(initial=0)
        batch = np.arange(len(ids)) // batch_size
        _, first, index = np.unique(
            ids - low + (batch * (high - low + 1))[:, None], return_index=True, return_inverse=True
        )
        return np.stack(np.divmod(first, ids.shape[1]), axis=1), index.reshape(ids.shape)

    def _kinds(self, frames: StepFrames, places: np.ndarray, cached_kind: int) -> np.ndarray:
        """Where each frame is; `cached_kind` for cached ones. [n]"""
        kinds = np.full(len(places), cached_kind)
        if not frames.all_cached:
            decoded = frames.slots[tuple(places.T)] >= 0
            kinds[decoded] = HOST if frames.frames.pool.device is None else DECODED
        for k, place in enumerate(places.tolist() if frames.replacements else ()):
            if tuple(place) in frames.replacements:
                kinds[k] = HOST
        return kinds

    def _memory(self, rows: int, nbytes: int) -> Tensor:
        if self.stream is None:
            return torch.from_numpy(self.buffers.take((rows, nbytes)))
        return torch.empty((rows, nbytes), dtype=torch.uint8, pin_memory=True)

    def _pinned(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self.stream is None else tensor.pin_memory()

    def _parts(self, camera: str, count: int) -> list[slice]:
        """The frames to copy, in parts for the threads. A small copy costs less than handing it to a thread."""
        max_parts, cache = self.jobs, self.store.caches.get(camera)
        if cache is None or not cache.jpeg:
            max_parts = min(max_parts, -(-count * self.store.stored_format(camera).nbytes // COPY_BYTES))
        return _slices(count, max_parts)

    def _copy(self, frames: StepFrames, places: np.ndarray, out: np.ndarray) -> None:
        if frames.all_cached:
            self.store.gather(frames.camera, frames.ids[tuple(places.T)], out)
            return
        if frames.all_decoded and frames.frames.pool.device is None:
            frames.frames.gather(frames.camera, frames.slots[tuple(places.T)], out)
            return

        def copy() -> None:
            for row, (i, t) in zip(out, places.tolist()):
                np.copyto(row, np.asarray(frames.planes(self.store, i, t)))

        self.store.retry_if_truncated(frames.camera, copy)

    def _gather(self, frames: StepFrames, places: np.ndarray, staged: Staged) -> None:
        """Gather frames that the GPU decoded, before their slots are reused."""
        assert self.stream is not None
        with torch.cuda.stream(self.stream):
            # NVDEC's frames are complete for later work on the default stream
            self.stream.wait_stream(torch.cuda.default_stream(self.stream.device))
            staged.decoded = torch.stack(
                [torch.as_tensor(frames.planes(self.store, i, t)) for i, t in places.tolist()]
            )
            self.stream.synchronize()


def _as_tensors(format: StoredFormat, planes: Tensor) -> Tensor:
    """Bytes of frames [n, nbytes] -> images, or features of them."""
    if isinstance(format, FeatureFormat):
        return format.tensors(planes)
    assert isinstance(format, PlaneFormat)
    return rgb_on_device(format, planes)


def _slices(count: int, max_parts: int) -> list[slice]:
    """range(count) in at most so many parts of about equal size."""
    parts = max(1, min(count, max_parts))
    edges = [count * part // parts for part in range(parts + 1)]
    return [slice(*edge) for edge in pairwise(edges)] if count else []
