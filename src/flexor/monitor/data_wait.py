"""How long a run waited for data: the time in which its GPU had nothing to do because a batch was missing.

The host queues a step's work and goes on. So the time that it spends in the loader is lost only if the GPU runs out
of work meanwhile. Two CUDA events measure that: one at the end of a step, one before the next step's first
operation. Nothing waits for them. They are read when they are complete, a step or two later: `stopping.Watch` keeps
the host from running further ahead. Without a GPU, all the time in the loader counts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch


@dataclass(eq=False)
class Gap:
    """From the end of one step's work on the GPU to the beginning of the next one's."""

    end: torch.cuda.Event
    start: torch.cuda.Event
    asked: float
    """Seconds that the host spent in the loader in between."""


class DataWait:
    """Measures between two log lines: `take` returns what was found since the last call."""

    def __init__(self, device: torch.device | None = None):
        self.device = device if device is not None and device.type == "cuda" else None
        self.waited = self.idle = 0.0
        self._end: torch.cuda.Event | None = None
        self._gaps: deque[Gap] = deque()
        self._free: list[torch.cuda.Event] = []

    def got(self, asked: float) -> None:
        """The next step's batch is here, after `asked` seconds. Call before its first operation."""
        if self.device is None:
            self.waited += asked
            return
        if self._end is not None:
            self._gaps.append(Gap(self._end, self._record(), asked))
            self._end = None
        else:
            self.waited += asked  # of the first step: the GPU has not begun
        self._read()

    def queued(self) -> None:
        """All work of a step is queued."""
        if self.device is not None:
            self._end = self._record()

    def take(self) -> tuple[float, float]:
        """Seconds of waiting for data, and seconds in which the GPU had no step to work on."""
        self._read()
        found = self.waited, self.idle
        self.waited = self.idle = 0.0
        return found

    def _record(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _read(self) -> None:
        while self._gaps and self._gaps[0].start.query():
            gap = self._gaps.popleft()
            idle = gap.end.elapsed_time(gap.start) / 1e3
            self.idle += idle
            self.waited += min(gap.asked, idle)
            self._free += [gap.end, gap.start]
