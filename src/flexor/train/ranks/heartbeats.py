"""The last heartbeat of every rank, exchanged through the torch.distributed store of the run.

A separate thread reads and writes: a call to the store blocks as long as the process that hosts the store is frozen,
whatever its timeout. Reading `peers` never waits for the store.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from flexor.core.log import log

if TYPE_CHECKING:
    from torch.distributed import Store

PREFIX = "flexor/watchdog/"
RANKS_PER_SECOND = 64  # every rank reads all others: with many ranks less often, to spare the store
LAST_WORDS = 3  # heartbeats that rank 0 waits at its end, so that the others can read its last one
DONE = ""
PATIENT = "patient"  # no time limit


class Moment(NamedTuple):
    """What a rank is doing: the nth part of a step."""

    step: int
    nth: int
    doing: str
    mode: str = ""  # or PATIENT


START = Moment(0, 0, "getting ready", PATIENT)


@dataclass
class Heartbeat:
    """What a rank reports about itself."""

    rank: int
    host: str = "an unknown host"
    moment: Moment = START
    idle: float = 0.0  # seconds without progress
    ended: str | None = None  # None: still running; DONE; or why it ended early
    heard: float = 0.0  # time of its last heartbeat, on the reader's clock: the clocks of hosts differ
    count: int = -1  # grows with each heartbeat

    def silence(self, now: float) -> float:
        return now - self.heard

    def write(self, count: int) -> str:
        return json.dumps([count, self.host, self.moment, self.idle, self.ended])

    def read(self, text: bytes, now: float) -> None:
        count, host, moment, idle, ended = json.loads(text)
        if count != self.count:
            self.count, self.host, self.moment, self.idle, self.ended = (
                count,
                host,
                Moment(*moment),
                idle,
                ended,
            )
            self.heard = now


class Heartbeats:
    """Sends what `own` returns to the other ranks, and reads their heartbeats, until stopped.

    The store must belong to this start of the run, as the default store of torch.distributed does. A store that
    outlives a restart still holds the heartbeats of the earlier ranks.
    """

    def __init__(
        self,
        own: Callable[[], Heartbeat],
        world_size: int,
        store: Store,
        clock: Callable[[], float],
        every_s: float,
    ):
        self.own, self.store, self.clock = own, store, clock
        self.peers = {rank: Heartbeat(rank) for rank in range(world_size) if rank != own().rank}
        self.every_s = max(every_s, world_size / RANKS_PER_SECOND)
        self.answered = 0.0  # when the store last answered
        self.lost = False  # the connection to the store is broken; a frozen store only stops answering
        self._missing = set(self.peers)  # reading a key that is not there yet would block
        self._link: Store | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def start(self) -> None:
        """Connects before it returns. That may take seconds (torch asks DNS), and the run may end soon after."""
        with suppress(RuntimeError):  # the thread tries again, and sets `lost`
            self._connect()
        self._thread.start()

    def stop(self) -> None:
        """Send a last heartbeat and end the thread, which could disturb the shutdown of the interpreter."""
        self._stop.set()
        self._thread.join(1 + LAST_WORDS * self.every_s)

    def _run(self) -> None:
        try:
            for count in itertools.count():
                last = self._stop.is_set()
                self._exchange(count, hear=not last)
                if last:
                    break
                self._stop.wait(self.every_s)
            if self.own().rank == 0:
                self._linger(count)
        except Exception:
            log.exception("The heartbeats of this rank stopped: the other ranks will take it for dead.")

    def _linger(self, count: int) -> None:
        """The store may end with rank 0: wait until the others have read its last heartbeat, or have ended."""
        limit = LAST_WORDS * self.every_s
        until = time.monotonic() + limit
        while not self.lost and time.monotonic() < until and self._anybody_there(limit):
            time.sleep(self.every_s / 10)
            self._exchange(count, hear=True)

    def _anybody_there(self, silent_s: float) -> bool:
        return any(p.ended is None and p.silence(self.clock()) < silent_s for p in self.peers.values())

    def _exchange(self, count: int, hear: bool) -> None:
        try:
            link = self._link or self._connect()
            own = self.own()
            link.set(f"{PREFIX}{own.rank}", own.write(count))
            if hear:
                self._hear(link)
        except RuntimeError:
            self._link, self.lost = None, True

    def _connect(self) -> Store:
        """A separate connection: on a shared one, this thread would wait for calls of the main thread."""
        self._link = self.store.clone() if hasattr(self.store, "clone") else self.store  # torch 2.7 can't
        return self._link

    def _hear(self, link: Store) -> None:
        self._missing -= {rank for rank in self._missing if link.check([f"{PREFIX}{rank}"])}
        known = [rank for rank in self.peers if rank not in self._missing]
        for rank, text in zip(known, link.multi_get([f"{PREFIX}{rank}" for rank in known])):
            self.peers[rank].read(text, self.clock())
        self.answered, self.lost = self.clock(), False
