"""Moves the images of a batch to a GPU: each distinct frame is transferred once, as planes.

Frames may come from host memory, from GPU slots that NVDEC decoded into, or from the GPU's frame cache. The GPU
converts them to RGB, and gathers windows that share frames.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from flexor.data.frames.gpu_cache import GPUFrames
from flexor.data.frames.slots import Buffers
from flexor.data.frames.store import FrameStore
from flexor.data.loader.step_frames import StepFrames
from flexor.data.video.planes import PlaneFormat, rgb_on_device

Job = Callable[[], None]


@dataclass(eq=False)
class Staged:
    """One camera's images of a batch. The distinct frames are those of `host`, `decoded` and `kept`, in order."""

    format: PlaneFormat
    index: np.ndarray  # [b] or [b, T] index of the distinct frame
    host: Tensor  # uint8 [h, nbytes], pinned if it will be transferred
    decoded: Tensor | None = None  # uint8 [d, nbytes], on the GPU
    keeper: GPUFrames | None = None
    kept: np.ndarray | None = None  # rows of the GPU's frame cache

    def on(self, device: torch.device) -> Tensor:
        """RGB uint8 [b, (T,) C, H, W] on the device."""
        parts = [self.host.to(device, non_blocking=True)] if len(self.host) else []
        if self.decoded is not None:
            parts.append(self.decoded)
        if self.keeper is not None and self.kept is not None:
            parts.append(self.keeper.planes[_index_on(device, self.kept)])
        planes = parts[0] if len(parts) == 1 else torch.cat(parts)
        return rgb_on_device(self.format, planes)[_index_on(device, self.index)]


def _index_on(device: torch.device, index: np.ndarray) -> Tensor:
    """The index on the device. From unpinned memory, the copy would wait for all earlier work on the GPU."""
    host = torch.from_numpy(index)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


class Stager:
    """Fills `Staged` images; without a stream they stay in host memory."""

    def __init__(self, store: FrameStore, stream: torch.cuda.Stream | None, jobs: int):
        self.store, self.stream, self.jobs = store, stream, jobs
        self.buffers = Buffers()

    def stage(self, shots: StepFrames, samples: np.ndarray) -> tuple[Staged, list[Job]]:
        """The images of some samples of a step, and the jobs that fill them in."""
        places, index = self._distinct(shots, samples)
        keeper = self.store.caches.get(shots.camera)
        keeper = keeper if isinstance(keeper, GPUFrames) else None
        kinds = [self._kind(shots, keeper, *place) for place in places]
        order = np.argsort(kinds, kind="stable")  # host 0, decoded 1, kept 2
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        sorted_places = [places[k] for k in order.tolist()]
        host, decoded = kinds.count(0), kinds.count(1)
        format = self.store.format(shots.camera)
        # the maximum size, so that the next batch can reuse it
        memory = self._memory(index.size, format.nbytes) if host else torch.empty((0, 0), dtype=torch.uint8)
        staged = Staged(format, rank[index], memory[:host])
        jobs: list[Job] = [
            partial(
                self._copy, shots, [sorted_places[k] for k in some.tolist()], staged.host[some[0] :].numpy()
            )
            for some in np.array_split(np.arange(host), self.jobs)
            if len(some)
        ]
        if decoded:
            jobs.append(partial(self._gather, shots, sorted_places[host : host + decoded], staged))
        if keeper is not None and len(places) > host + decoded:
            staged.keeper = keeper
            staged.kept = np.array([keeper.row(int(shots.ids[p])) for p in sorted_places[host + decoded :]])
        return staged, jobs

    def _distinct(self, shots: StepFrames, samples: np.ndarray) -> tuple[list[tuple[int, int]], np.ndarray]:
        """A position [sample, step] of each distinct frame, and the frame of each position; replacements count."""
        found: dict[tuple, int] = {}
        places: list[tuple[int, int]] = []
        index = np.empty((len(samples), shots.ids.shape[1]), np.int64)
        for row, i in enumerate(samples.tolist()):
            for t, frame in enumerate(shots.ids[i].tolist()):
                key = (i, t) if (i, t) in shots.stand_ins else (frame,)
                index[row, t] = found.setdefault(key, len(places))
                if len(found) > len(places):
                    places.append((i, t))
        return places, index

    def _kind(self, shots: StepFrames, keeper: GPUFrames | None, i: int, t: int) -> int:
        if (i, t) in shots.stand_ins:
            return 0
        slot = shots.decoded(i, t)
        if slot is not None:
            return 1 if isinstance(slot, Tensor) else 0
        return 0 if keeper is None else 2

    def _memory(self, rows: int, nbytes: int) -> Tensor:
        if self.stream is None:
            return torch.from_numpy(self.buffers.take((rows, nbytes)))
        return torch.empty((rows, nbytes), dtype=torch.uint8, pin_memory=True)

    def _copy(self, shots: StepFrames, places: list[tuple[int, int]], out: np.ndarray) -> None:
        for k, place in enumerate(places):
            np.copyto(out[k], np.asarray(shots.planes(self.store, *place)))

    def _gather(self, shots: StepFrames, places: list[tuple[int, int]], staged: Staged) -> None:
        """Gather frames that the GPU decoded, before their slots are reused."""
        assert self.stream is not None
        with torch.cuda.stream(self.stream):
            # NVDEC's frames are complete for later work on the default stream
            self.stream.wait_stream(torch.cuda.default_stream(self.stream.device))
            staged.decoded = torch.stack(
                [torch.as_tensor(shots.planes(self.store, *place)) for place in places]
            )
            self.stream.synchronize()
