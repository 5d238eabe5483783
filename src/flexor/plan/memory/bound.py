"""What a run needs at least: sums of tensors, which take a hundredth of the time of a replay on the allocator."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from flexor.plan.memory.allocator import ROUND
from flexor.plan.trace.events import Category, Trace, unfreed

STORED: tuple[Category, ...] = ("weights", "optimizer", "ema")


def stored(trace: Trace) -> int:
    """Bytes of weights, the optimizer's state and a moving average."""
    sizes = {event.storage: event.nbytes for event in trace.events if event.kind == "alloc"}
    return sum(sizes[storage] for storage in unfreed(trace.events) if trace.category[storage] in STORED)


@dataclass(frozen=True)
class LeastMemory:
    """Bytes in torch's allocator."""

    state: int
    """What is never freed, such as weights and the optimizer's state. It does not depend on the batch size."""
    peak: int
    """The most that tensors take at once, in any step but the first."""


@functools.lru_cache(maxsize=64)
def least_memory(trace: Trace) -> LeastMemory:
    """No replay of the trace needs less: it repeats every step, and at its start the whole state exists already."""
    start, end = trace.steps[-1].start, trace.steps[-1].end
    kinds, storages, nbytes, _ = zip(*trace.events[:end], strict=True)
    alloc, free = (np.array([each == kind for each in kinds]) for kind in ("alloc", "free"))
    storage = np.array(storages)
    size = -(-np.array(nbytes) // ROUND) * ROUND
    of_storage = np.zeros(storage.max() + 1, dtype=np.int64)
    of_storage[storage[alloc]] = size[alloc]
    change = np.where(alloc, size, 0) - np.where(free, of_storage[storage], 0)
    freed = np.zeros(len(of_storage), dtype=bool)
    freed[storage[free]] = True
    state = int(of_storage[~freed].sum())
    temporary = np.zeros(len(of_storage), dtype=bool)  # allocated and freed within the step
    temporary[storage[start:][alloc[start:]]] = True
    temporary &= freed
    allocated = np.cumsum(np.where(temporary[storage], change, 0)[start:])
    allocated += np.where(alloc | free, 0, size)[start:]  # workspaces, during one operation
    return LeastMemory(state, state + int(allocated.max(initial=0)))
