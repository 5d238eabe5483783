"""Reusable memory for frames that wait for their batch, with a byte budget.

The page faults of a new allocation of megabytes cost as much time as the copy into it. So frames are
stored in slots of large blocks, and whole batches in buffers that are reused once nothing references them.
"""

from __future__ import annotations

import sys
import threading

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from flexor.data.frames.decode_processes import SharedMemory

Slot = np.ndarray | Tensor

BLOCK = 32 << 20  # bytes that slots are cut from
MOST_SLOTS = 1024  # of one block


class Pool:
    """Slots for frames. `used` never exceeds `budget`, except by slots taken with `force`.

    Slots are arrays in host memory, or tensors on the GPU if the GPU decodes.
    """

    def __init__(self, budget: int, device: torch.device | None = None, memory: SharedMemory | None = None):
        """`memory`: where slots in host memory are, if other processes decode into them."""
        self.budget = budget
        self.device = device
        self.memory = memory
        self.used = 0
        self.peak = 0
        self._free: dict[int, list[Slot]] = {}
        self._lock = threading.Lock()

    def take(self, sizes: dict[int, int], force: bool = False) -> dict[int, list[Slot]] | None:
        """{bytes: count} -> that many slots of each size, or None if there is no room for all of them."""
        need = sum(size * count for size, count in sizes.items())
        with self._lock:
            if self.used + need > self.budget and not force:
                return None
            self.used += need
            self.peak = max(self.peak, self.used)
            return {size: [self._slot(size) for _ in range(count)] for size, count in sizes.items()}

    def give(self, slots: list[Slot]) -> None:
        with self._lock:
            for slot in slots:
                self.used -= len(slot)
                self._free[len(slot)].append(slot)

    def _slot(self, size: int) -> Slot:
        free = self._free.setdefault(size, [])
        if not free:
            shape = (max(1, min(BLOCK // size, MOST_SLOTS)), size)
            if self.device is None:
                free.extend(np.empty(shape, np.uint8) if self.memory is None else self.memory.empty(shape))
            else:
                free.extend(torch.empty(shape, dtype=torch.uint8, device=self.device))
        return free.pop()


class Buffers:
    """Arrays for batches. An array is reused once nothing references it or any of its views."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: DTypeLike = np.uint8) -> np.ndarray:
        """An array of this shape, with its previous content."""
        with self._lock:
            for array in self._arrays:
                # References: the list, `array` and the call itself. Any view would be one more.
                if array.shape == shape and array.dtype == dtype and sys.getrefcount(array) == 3:
                    return array[:]
            self._arrays.append(np.empty(shape, dtype))
            return self._arrays[-1][:]
