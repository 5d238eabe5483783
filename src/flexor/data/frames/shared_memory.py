"""Memory that other processes can read and write. It has no name, so nothing stays behind, however a process ends."""

from __future__ import annotations

import mmap
import os
import threading

import numpy as np

__all__ = ["SharedArena", "SharedMemory"]

ALIGNED = 64  # bytes
ARENA_BLOCK = 16 << 20  # bytes; a system gives a page to it when it is first written


class SharedMemory:
    """Arrays of bytes in one file without a name."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("flexor-frames", os.MFD_CLOEXEC)
        self.size = 0

    def empty(self, shape: tuple[int, int]) -> np.ndarray:
        """A new array of bytes, not initialised; it begins at the size so far."""
        nbytes = -(-shape[0] * shape[1] // mmap.PAGESIZE) * mmap.PAGESIZE
        offset, self.size = self.size, self.size + nbytes
        os.ftruncate(self.descriptor, self.size)
        memory = np.frombuffer(mmap.mmap(self.descriptor, nbytes, offset=offset), np.uint8)
        return memory[: shape[0] * shape[1]].reshape(shape)

    def close(self) -> None:
        """No further processes; its arrays stay usable."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            self.close()


class SharedArena(SharedMemory):
    """Many small arrays in few large ones: a process may map only some tens of thousands."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._block = np.empty(0, np.uint8)
        self._begin = self._used = 0

    def take(self, nbytes: int) -> tuple[int, np.ndarray]:
        """A new array of bytes, and where it begins."""
        with self._lock:
            if self._used + nbytes > len(self._block):
                self._begin, self._used = self.size, 0
                self._block = self.empty((1, max(nbytes, ARENA_BLOCK)))[0]
            first = self._used
            self._used += -(-nbytes // ALIGNED) * ALIGNED
            return self._begin + first, self._block[first : first + nbytes]
