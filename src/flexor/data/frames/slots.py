"""Reusable memory for frames that wait for their batch, with a byte budget.

The page faults of a new allocation of megabytes cost as much time as the copy into it. So frames are
stored in slots of large blocks, and whole batches in buffers that are reused once nothing references them.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from flexor.data.frames.shared_memory import SharedMemory

Slot = np.ndarray | Tensor

BLOCK = 32 << 20  # bytes that slots are cut from
MOST_SLOTS = 1024  # of one block


class Pool:
    """Slots for frames, by size and number. `used` never exceeds `budget`, except by slots taken with `force`.

    Slots are arrays in host memory, or tensors on the GPU if the GPU decodes.
    """

    def __init__(self, budget: int, device: torch.device | None = None, memory: SharedMemory | None = None):
        """`memory`: where slots in host memory are, if other processes decode into them."""
        self.budget = budget
        self.device = device
        self.memory = memory
        self.used = 0
        self.peak = 0
        self._slots: dict[int, _SlotsOfSize] = {}
        self._lock = threading.Lock()

    @property
    def room(self) -> int:
        """Bytes that are left of the budget; it may have been exceeded."""
        return self.budget - self.used

    def take(self, sizes: dict[int, int], force: bool = False) -> dict[int, np.ndarray] | None:
        """{bytes: count} -> numbers of that many slots of each size, or None if there is no room for all of them."""
        need = sum(size * count for size, count in sizes.items())
        with self._lock:
            if self.used + need > self.budget and not force:
                return None
            self.used += need
            self.peak = max(self.peak, self.used)
            return {size: self._of(size).take(count) for size, count in sizes.items()}

    def give(self, size: int, numbers: np.ndarray) -> None:
        """These slots are not used any more."""
        with self._lock:
            self.used -= size * len(numbers)
            self._of(size).free.append(numbers)

    def slot(self, size: int, number: int) -> Slot:
        """Its memory, uint8 [size]."""
        return self._slots[size].slot(number)

    def gather(self, size: int, numbers: np.ndarray, out: np.ndarray) -> None:
        """Copy slots in host memory to `out`, uint8 [n, size]."""
        slots = self._slots[size]
        if len(slots.blocks) == 1 or (numbers < len(slots.blocks[0])).all():
            np.take(slots.blocks[0], numbers, axis=0, out=out, mode="clip")  # others may run Python meanwhile
            return
        for row, number in zip(out, numbers.tolist()):
            row[:] = slots.slot(number)

    def offsets(self, size: int, numbers: np.ndarray) -> np.ndarray:
        """Where slots begin in the shared memory."""
        slots = self._slots[size]
        block = np.searchsorted(slots.first, numbers, side="right") - 1
        return np.array(slots.offsets)[block] + (numbers - np.array(slots.first)[block]) * size

    def _of(self, size: int) -> _SlotsOfSize:
        if size not in self._slots:
            self._slots[size] = _SlotsOfSize(size, self.budget, self.device, self.memory)
        return self._slots[size]


class _SlotsOfSize:
    """All slots of one size, in blocks. In host memory the first block has room for the whole budget: the system
    gives a page to it when it is first written."""

    def __init__(self, size: int, budget: int, device: torch.device | None, memory: SharedMemory | None):
        self.size, self.device, self.memory = size, device, memory
        self.blocks: list[Any] = []  # [n, size]
        self.first: list[int] = []  # number of each block's first slot
        self.offsets: list[int] = []  # of each block in shared memory
        self.free: list[np.ndarray] = []
        self._add_block(1 if device is not None else budget // size)

    def take(self, count: int) -> np.ndarray:
        parts: list[np.ndarray] = []
        while count:
            if not self.free:
                self._add_block(count)
            numbers = self.free.pop()
            parts.append(numbers[:count])
            if len(numbers) > count:
                self.free.append(numbers[count:])
            count -= len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def slot(self, number: int) -> Slot:
        block = bisect_right(self.first, number) - 1
        slot: Slot = self.blocks[block][number - self.first[block]]
        return slot

    def _add_block(self, least: int) -> None:
        count = max(1, min(BLOCK // self.size, MOST_SLOTS), least)
        if self.device is not None:
            block: Any = torch.empty((count, self.size), dtype=torch.uint8, device=self.device)
        elif self.memory is not None:
            self.offsets.append(self.memory.size)
            block = self.memory.empty((count, self.size))
        else:
            block = np.empty((count, self.size), np.uint8)
        first = self.first[-1] + len(self.blocks[-1]) if self.blocks else 0
        self.blocks.append(block)
        self.first.append(first)
        self.free.append(np.arange(first, first + count))


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
