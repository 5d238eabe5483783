"""How often something may happen, on average."""

from __future__ import annotations

import time

BURST_S = 1.0  # this much of a rate may be used at once


class RateLimit:
    """So many requests per second on average: a bucket that fills with time."""

    def __init__(self, per_s: float):
        self.per_s, self.most = per_s, max(1.0, BURST_S * per_s)
        self.left, self.last = self.most, time.perf_counter()

    def wait_s(self) -> float:
        """Take one, and say how long to wait before it may be used."""
        now = time.perf_counter()
        self.left = min(self.most, self.left + (now - self.last) * self.per_s) - 1
        self.last = now
        return max(0.0, -self.left / self.per_s)
