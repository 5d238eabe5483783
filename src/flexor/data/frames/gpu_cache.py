"""Frames kept in the memory of the GPU that trains: no loading at all after the first epoch."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from flexor.data.frames.slots import Slot


class GPUFrames:
    """The planes of some frames of a camera, on a GPU. Has the face of a `FrameCache`."""

    jpeg = False

    def __init__(self, room: int, frames: int, nbytes: int, device: torch.device):
        """Room for so many frames, out of `frames` that the dataset has in all."""
        self.planes = torch.empty((room, nbytes), dtype=torch.uint8, device=device)
        self.count = 0
        self._rows = np.full(frames, -1, np.int64)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.Lock()

    def have(self, ids: np.ndarray) -> np.ndarray:
        return self._rows[ids] >= 0

    def row(self, frame: int) -> int:
        """Where a frame lies in `planes`; -1 if it is not there."""
        return int(self._rows[frame])

    def view(self, frame: int) -> np.ndarray:
        """A copy in host memory, for whoever reads at random."""
        return self.planes[self._rows[frame]].cpu().numpy()

    def put(self, ids: np.ndarray, frames: Sequence[Slot]) -> None:
        """Frames that there is no room for are left out."""
        with self._lock, torch.cuda.stream(self._stream):
            if self._stream is not None:  # the GPU may have decoded them itself, on the default stream
                self._stream.wait_stream(torch.cuda.default_stream(self.planes.device))
            new = [i for i in range(len(ids)) if self._rows[ids[i]] < 0][: len(self.planes) - self.count]
            for k, i in enumerate(new):
                self.planes[self.count + k].copy_(torch.as_tensor(frames[i]), non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()  # only now is it there for other streams
            self._rows[ids[new]] = self.count + np.arange(len(new))
            self.count += len(new)

    @property
    def nbytes(self) -> int:
        return self.planes.nbytes

    def sync(self) -> None:
        """There is nothing that could outlive the process."""

    def close(self) -> None:
        self.planes = self.planes[:0]
