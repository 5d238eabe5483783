"""How often something may happen, and how often the log says so."""

from __future__ import annotations

import time

from flexor.core.log import log

BURST_S = 1.0  # this much of a rate may be used at once
NOTE_S = 1.0  # at least between two lines in the log about clients
NOTED = 500  # characters of a line


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


class ClientNotes:
    """Lines in the log about clients, but not as often as somebody can send nonsense: that would fill a disk."""

    def __init__(self) -> None:
        # when the log may have another line, and how many it has not
        self.next_note, self.suppressed_notes = 0.0, 0

    def note(self, who: str, reason: str) -> None:
        now = time.monotonic()
        if now < self.next_note:
            self.suppressed_notes += 1
            return
        suppressed = self.suppressed_notes
        more = f" (and {suppressed} more since the last such line)" if suppressed else ""
        log.info("%s: %s%s", who, reason[:NOTED], more)
        self.next_note, self.suppressed_notes = now + NOTE_S, 0
