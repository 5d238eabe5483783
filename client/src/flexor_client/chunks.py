"""Which action a robot executes when, while chunks arrive late: the arithmetic of real-time chunking, without a clock.

Executed actions are counted. A chunk is asked for with the observation at one count, and its actions follow from
there, however long the answer takes: what the robot executes meanwhile, of the last chunk, stands for the first actions
of the new one. While a robot has nothing to execute it stands still, and the count with it.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from flexor_client.errors import ClientError


class Timeline:
    """The actions to come.

    `execute`: actions of a chunk to use before the next one takes over; None: all. `margin`: steps by which the next
    is asked for earlier than the latency says. `blend`: steps over which a new chunk takes over from the last one; 0
    where the policy itself continues the last chunk.
    """

    DELAYS = 10  # answers whose latency counts

    def __init__(self, execute: int | None = None, margin: int = 1, blend: int = 3):
        for name, value, minimum in (("execute", execute, 1), ("margin", margin, 0), ("blend", blend, 0)):
            if value is not None and value < minimum:
                raise ClientError(f"{name}={value}: must be at least {minimum}.")
        self.execute, self.margin, self.blend = execute, margin, blend
        self._delays: deque[int] = deque(maxlen=self.DELAYS)
        self.clear()

    def clear(self) -> None:
        """A new episode: nothing is planned. What is known of the latency stays."""
        self.executed = 0  # actions so far
        self.first = 0  # the count at which the first planned action is executed
        self.actions: np.ndarray | None = None  # [K, A], from `first` on
        self.chunk_first, self.chunk_length = 0, 0  # of the newest chunk

    @property
    def delay(self) -> int:
        """Steps that an answer is expected to take: the longest of the last few, but for one outlier."""
        return sorted(self._delays)[-2:][0] if self._delays else 0

    def add_delay(self, steps: int) -> None:
        """An answer took this many steps."""
        self._delays.append(max(int(steps), 0))

    def remaining(self) -> np.ndarray | None:
        """The planned actions from now on, [K, A]; None if there are none."""
        if self.actions is None or self.executed - self.first >= len(self.actions):
            return None
        return self.actions[self.executed - self.first :]

    def is_due(self) -> bool:
        """Whether it is time to ask for the next chunk."""
        if self.remaining() is None:
            return True
        execute = self.chunk_length if self.execute is None else min(self.execute, self.chunk_length)
        return self.executed >= self.chunk_first + max(execute - self.delay - self.margin, 1)

    def take(self, chunk: np.ndarray, requested_at: int) -> None:
        """Plan a chunk [H, A], requested when `requested_at` actions had been executed, without those in the past."""
        chunk = np.array(chunk, copy=True)
        late = self.executed - requested_at
        new, old = chunk[late:], self.remaining()
        if not len(new):
            return  # the whole chunk has passed: the planned actions stay
        if old is not None and self.blend:
            steps = min(self.blend, len(old), len(new))
            weight = (1 - np.arange(1, steps + 1) / (self.blend + 1)).astype(chunk.dtype)[:, None]
            new[:steps] = weight * old[:steps] + (1 - weight) * new[:steps]
        self.first, self.actions = self.executed, new
        self.chunk_first, self.chunk_length = requested_at, len(chunk)

    def drop(self) -> None:
        """Forget what is planned."""
        self.actions = None

    def next(self) -> np.ndarray | None:
        """The action [A] to execute now, None if nothing is planned."""
        remaining = self.remaining()
        if remaining is None:
            return None
        self.executed += 1
        action: np.ndarray = remaining[0].copy()
        return action
