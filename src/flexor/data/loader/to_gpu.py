"""Pictures on their way to a GPU: each distinct frame of a batch goes there once, as planes.

Frames may come from the host's memory, from slots on the GPU that it decoded into, or from those it keeps. There they
become RGB, and windows that share frames are gathered from them.
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
from flexor.data.loader.step_frames import Shots
from flexor.data.video.planes import PlaneFormat, rgb_on_device

Job = Callable[[], None]


@dataclass(eq=False)
class Staged:
    """One camera's pictures of a batch. The distinct frames are those of `host`, `decoded` and `kept`, in order."""

    format: PlaneFormat
    index: np.ndarray  # [b] or [b, T] which distinct frame
    host: Tensor  # uint8 [h, nbytes], pinned if it is to go anywhere
    decoded: Tensor | None = None  # uint8 [d, nbytes], on the GPU
    keeper: GPUFrames | None = None
    kept: np.ndarray | None = None  # rows of the keeper

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
    """From memory that is not pinned it would be copied only when the GPU has done all it was given before."""
    host = torch.from_numpy(index)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


class Stager:
    """Fills `Staged` pictures; without a stream they stay in the host's memory."""

    def __init__(self, store: FrameStore, stream: torch.cuda.Stream | None, jobs: int):
        self.store, self.stream, self.jobs = store, stream, jobs
        self.buffers = Buffers()

    def stage(self, shots: Shots, samples: np.ndarray) -> tuple[Staged, list[Job]]:
        """The pictures of some samples of a step, and the jobs that fill them in."""
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
        # as large as it may ever be, so that the next batch can have it again
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

    def _distinct(self, shots: Shots, samples: np.ndarray) -> tuple[list[tuple[int, int]], np.ndarray]:
        """A place [sample, step] of each distinct frame, and which one every place shows; stand-ins are distinct."""
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

    def _kind(self, shots: Shots, keeper: GPUFrames | None, i: int, t: int) -> int:
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

    def _copy(self, shots: Shots, places: list[tuple[int, int]], out: np.ndarray) -> None:
        for k, place in enumerate(places):
            np.copyto(out[k], np.asarray(shots.planes(self.store, *place)))

    def _gather(self, shots: Shots, places: list[tuple[int, int]], staged: Staged) -> None:
        """Frames that the GPU decoded, brought together there before their slots are used again."""
        assert self.stream is not None
        with torch.cuda.stream(self.stream):
            # NVDEC's frames are complete for what follows on the default stream
            self.stream.wait_stream(torch.cuda.default_stream(self.stream.device))
            staged.decoded = torch.stack(
                [torch.as_tensor(shots.planes(self.store, *place)) for place in places]
            )
            self.stream.synchronize()
