"""What a run needs at least: sums of tensors, which take a hundredth of the time of a replay on the allocator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexor.plan.memory.allocator import ROUND
from flexor.plan.trace.events import Trace


@dataclass(frozen=True)
class LeastMemory:
    """Bytes in torch's allocator."""

    kept: int
    """What is never freed, such as weights and the optimizer's state. It does not depend on the batch size."""
    peak: int
    """The most that tensors take at once, in any step but the first."""


def least_memory(trace: Trace) -> LeastMemory:
    """No replay of the trace needs less: it plays every step again, when all that is kept is there from its start."""
    start, end = trace.steps[-1].start, trace.steps[-1].end
    what, storages, nbytes, _ = zip(*trace.events[:end], strict=True)
    born, dies = (np.array([each == kind for each in what]) for kind in ("born", "dies"))
    storage = np.array(storages)
    size = -(-np.array(nbytes) // ROUND) * ROUND
    of_storage = np.zeros(storage.max() + 1, dtype=np.int64)
    of_storage[storage[born]] = size[born]
    change = np.where(born, size, 0) - np.where(dies, of_storage[storage], 0)
    freed = np.zeros(len(of_storage), dtype=bool)
    freed[storage[dies]] = True
    kept = int(of_storage[~freed].sum())
    passing = np.zeros(len(of_storage), dtype=bool)  # what comes and goes within the step
    passing[storage[start:][born[start:]]] = True
    passing &= freed
    held = np.cumsum(np.where(passing[storage], change, 0)[start:])
    held += np.where(born | dies, 0, size)[start:]  # workspaces, during one operation
    return LeastMemory(kept, kept + int(held.max(initial=0)))
