"""Figures of a run between two lines of the log: means of what was measured, and rates."""

from __future__ import annotations

import time
from collections import defaultdict

import torch
from torch import Tensor


class Meters:
    """Collects values on their device, so that measuring never makes the loop wait for the GPU."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sums: dict[str, Tensor | float] = {}
        self.counts: dict[str, int] = defaultdict(int)
        self.samples = 0
        self.started = time.perf_counter()
        self.waited = 0.0

    def add(self, name: str, value: Tensor | float) -> None:
        value = value.detach() if isinstance(value, Tensor) else value
        self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.counts[name] += 1

    def report(self) -> dict[str, float]:
        """Means since the last reset, samples per second, and the share of time spent waiting for data."""
        elapsed = time.perf_counter() - self.started
        means = {name: float(torch.as_tensor(total)) / self.counts[name] for name, total in self.sums.items()}
        return {
            **means,
            "samples_per_s": self.samples / max(elapsed, 1e-9),
            "data_wait": self.waited / max(elapsed, 1e-9),
        }
