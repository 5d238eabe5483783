"""Frames cached in the memory of the training GPU: no data loading after the first epoch."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from flexor.data.frames.slots import Slot


class GPUFrameCache:
    """The planes of some frames of a camera, on a GPU. Same interface as `FrameCache`."""

    jpeg = False

    def __init__(self, room: int, frames: int, nbytes: int, device: torch.device):
        """Space for `room` of the dataset's `frames` frames."""
        self.planes = torch.empty((room, nbytes), dtype=torch.uint8, device=device)
        self.count = 0
        self._rows = np.full(frames, -1, np.int64)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.Lock()

    def has(self, ids: np.ndarray) -> np.ndarray:
        return self._rows[ids] >= 0

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """The rows of frames in `planes`; -1 for those that are not cached."""
        return self._rows[ids]

    def view(self, frame: int) -> np.ndarray:
        """A copy in host memory, for random access."""
        return self.planes[self._rows[frame]].cpu().numpy()

    def put(self, ids: np.ndarray, frames: Sequence[Slot]) -> None:
        """Cache frames; those that do not fit are not cached."""
        with self._lock, torch.cuda.stream(self._stream):
            if self._stream is not None:  # the GPU may have decoded them, on the default stream
                self._stream.wait_stream(torch.cuda.default_stream(self.planes.device))
            new = [i for i in range(len(ids)) if self._rows[ids[i]] < 0][: len(self.planes) - self.count]
            for k, i in enumerate(new):
                self.planes[self.count + k].copy_(torch.as_tensor(frames[i]), non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()  # only now can other streams read it
            self._rows[ids[new]] = self.count + np.arange(len(new))
            self.count += len(new)

    @property
    def nbytes(self) -> int:
        return self.planes.nbytes

    def sync(self) -> None:
        """Nothing to do: nothing survives the process."""

    def close(self) -> None:
        self.planes = self.planes[:0]
