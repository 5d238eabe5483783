"""Metrics of a run between two log lines: means of measured values, and rates."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from typing import Any, Protocol

import torch
from torch import Tensor

from flexor.monitor.data_wait import DataWait


def as_json(values: dict[str, Any]) -> dict[str, Any]:
    """Values that JSON can represent. JSON has no infinity, but fp16 sometimes has infinite gradient norms."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


class Ranks(Protocol):
    """The methods of an engine that meters need."""

    def sum(self, values: Tensor) -> Tensor: ...
    def max(self, value: float) -> float: ...


class Meters:
    """Collects values on their device, so that the loop never waits for the GPU to measure something."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.data = DataWait(device)
        self.reset()

    def reset(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = defaultdict(int)
        self.parts: set[str] = set()
        self.samples = 0
        self.started = time.perf_counter()

    def add(self, name: str, value: Tensor, summed: bool = False) -> None:
        """`summed`: the value is this rank's part of a sum over ranks."""
        value = value.detach()
        self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.counts[name] += 1
        if summed:
            self.parts.add(name)

    def report(self, ranks: Ranks) -> dict[str, float]:
        """Means since the last reset, samples per second, and shares of the time.

        `data_wait`: the slowest rank waited for data. `gpu_busy`, with a GPU: the least busy one had a step to work on.
        """
        elapsed = ranks.max(time.perf_counter() - self.started)
        parts = sorted(self.parts)
        if parts:
            over_all = ranks.sum(torch.stack([self.sums[name].float() for name in parts]))
            self.sums |= dict(zip(parts, over_all))
        values = {name: float(total) / self.counts[name] for name, total in self.sums.items()}
        waited, idle = self.data.take()
        values["samples_per_s"] = self.samples / max(elapsed, 1e-9)
        values["data_wait"] = ranks.max(waited) / max(elapsed, 1e-9)
        if self.data.device is not None:
            values["gpu_busy"] = max(0.0, 1 - ranks.max(idle) / max(elapsed, 1e-9))
        return values
