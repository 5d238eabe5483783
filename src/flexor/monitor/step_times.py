"""Where the time of a run goes, part by part, without waiting for the GPU.

A run sets marks. Each assigns the time since the previous mark to a part, so the parts add up to all of the time. On a
GPU a mark is a CUDA event in the training stream. So a part is the time for which it occupies the GPU: the loader
counts only while the GPU has run out of work, and a copy on another stream only while the step waits for it. Nothing
waits for an event. It is read when it is complete, a step or two later, because `stopping.StopConditions` keeps the
host from running further ahead. On other devices a mark reads the clock.

A CUDA graph can record events too, but its next replay, which is queued before this one is complete, records the same
ones again: a time could be the difference of two steps. So `train.graph` cuts a step into a graph for each part, and
the marks are set between them. A graph can't be cut while it exchanges gradients: there `waits` reads the GPU's clock.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import flexor.kernels.gpu_clock  # noqa: F401 (defines the operator)
from flexor.kernels.available import has_kernels

# Parts of a step, as in `metrics.jsonl` (NAME_s). The time in the loader is `data_wait`.
COMPUTING = ("forward", "backward", "communication", "optimizer")
PARTS = ("copy", *COMPUTING, "checkpoint", "evaluation")
IDLE = ("data", "other", "checkpoint", "evaluation")  # the GPU has no step to work on
LAST = "optimizer"  # the last part of each step


class StepTimes:
    """Measures between two log lines: `take` returns the times since the last call. Without a device it is off.

    `exchanges`: ranks exchange gradients in the backward pass, and wait for each other at its end (DDP).
    """

    def __init__(self, device: torch.device | None = None, exchanges: bool = False):
        self.device, self.exchanges = device, exchanges
        self.on_gpu = device is not None and device.type == "cuda"
        self.cut: Callable[[str], None] | None = None
        """While a step is captured: ends the graph of a part."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.steps = 0
        self._last_mark: Any = None  # an event, or a time
        self._marks: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []
        self._began = 0.0
        self._waited = torch.zeros(2, dtype=torch.int64, device=device) if exchanges and self.on_gpu else None

    # The loop calls these once per step, in this order.

    def waiting(self) -> None:
        """The loop asks for the next batch. The time since the last part of a step belongs to no part."""
        self.mark("other")
        self._read()

    def has_batch(self) -> None:
        """The batch is ready to be copied to the GPU."""
        self.mark("data")

    def begins(self) -> None:
        """The batch's copy is queued, and the step begins."""
        self.mark("copy")
        self._began = time.perf_counter()

    def queued(self) -> None:
        """The host has queued all work of a step."""
        self.seconds["launch"] += time.perf_counter() - self._began

    # Called from anywhere

    def mark(self, part: str) -> None:
        """Assign the time since the last mark to `part`."""
        if self.device is None:
            return
        if self.cut is not None:
            self.cut(part)
            return
        if self.on_gpu:
            self._record(part)
            return
        now = time.perf_counter()
        if self._last_mark is not None:
            self._add(part, now - self._last_mark)
        self._last_mark = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Assign the block to a part that not every step has."""
        self.mark("other")
        yield
        self.mark(name)

    @contextmanager
    def waits(self) -> Iterator[None]:
        """In a graph, at the end of the backward pass: the block waits for other ranks."""
        if self._waited is None or not has_kernels(self._waited.device):
            yield
            return
        torch.ops.flexor.add_gpu_time(self._waited, True)
        yield
        torch.ops.flexor.add_gpu_time(self._waited, False)

    def take(self) -> tuple[dict[str, float], int]:
        """Seconds of every part, and the number of steps."""
        self._read()
        if self._waited is not None and self.seconds["backward"]:
            seconds = min(1e-9 * float(self._waited[0]), self.seconds["backward"])
            self._waited.zero_()
            self.seconds["backward"] -= seconds
            self.seconds["communication"] += seconds
        measured = dict(self.seconds), self.steps
        self.seconds, self.steps = defaultdict(float), 0
        return measured

    def _record(self, part: str) -> None:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        if self._last_mark is not None:
            self._marks.append((part, self._last_mark, event))
        self._last_mark = event

    def _read(self) -> None:
        while self._marks and self._marks[0][2].query():
            part, start, event = self._marks.popleft()
            self._add(part, start.elapsed_time(event) / 1e3)
            self._free.append(start)

    def _add(self, part: str, seconds: float) -> None:
        self.seconds[part] += seconds
        self.steps += part == LAST
