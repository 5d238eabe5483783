"""How often something may happen, on average."""

from __future__ import annotations

import time

BURST_S = 1.0  # this much of a rate may be used at once


class RateLimit:
    """A token bucket: so many requests per second on average."""

    def __init__(self, per_s: float):
        self.per_s, self.capacity = per_s, max(1.0, BURST_S * per_s)
        self.tokens, self.updated = self.capacity, time.perf_counter()

    def wait_s(self) -> float:
        """Take one, and say how long to wait before it may be used."""
        now = time.perf_counter()
        self.tokens = min(self.capacity, self.tokens + (now - self.updated) * self.per_s) - 1
        self.updated = now
        return max(0.0, -self.tokens / self.per_s)
