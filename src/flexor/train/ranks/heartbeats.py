"""What every rank last said of itself, passed on through the store that the run was started with.

A thread of its own reads and writes, because a call of a store blocks for as long as the process that keeps
the store is frozen, whatever timeout it was given. Whoever looks at `peers` never waits for the store.
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
RANKS_PER_SECOND = 64  # all ranks read all ranks: with more of them, less often, to spare the store
LAST_WORDS = 3  # heartbeats for which rank 0 waits for the others to hear of its end
DONE = ""
PATIENT = "patient"  # may take as long as it likes


class Moment(NamedTuple):
    """Where a rank is: the nth thing it does in a step."""

    step: int
    nth: int
    doing: str
    mode: str = ""  # or PATIENT


START = Moment(0, 0, "getting ready", PATIENT)


@dataclass
class Heartbeat:
    """What a rank says of itself."""

    rank: int
    host: str = "a host that is not known yet"
    moment: Moment = START
    idle: float = 0.0  # seconds without progress
    ended: str | None = None  # None: at work; DONE; or why it ended before
    heard: float = 0.0  # when it last said something new, on the clock of who heard it: hosts' clocks differ
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
    """Says what `own` returns to the other ranks, and hears what they say, until stopped.

    The store must be this start's own, as the default one of torch.distributed is: in a store that outlives
    a restart lie the words of the ranks before.
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
        self.lost = False  # the connection to the store is broken: a frozen store just does not answer
        self._missing = set(self.peers)  # reading a key that is not there yet would block
        self._link: Store | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def start(self) -> None:
        """Connects before it returns: that may take seconds (torch asks DNS for names), and the end may be near."""
        with suppress(RuntimeError):  # the thread tries again, and says that the store is lost
            self._connect()
        self._thread.start()

    def stop(self) -> None:
        """Say a last word. Ended before the interpreter is, a thread can't get in the way of its shutdown."""
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
            log.exception("The heartbeats of this rank stopped, so the others will think it is dead.")

    def _linger(self, count: int) -> None:
        """The store may end with rank 0: the others must have heard its last word, or have ended themselves."""
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
        """A connection of our own: on a shared one, we would wait for what the main thread waits for."""
        self._link = self.store.clone() if hasattr(self.store, "clone") else self.store  # torch 2.7 can't
        return self._link

    def _hear(self, link: Store) -> None:
        self._missing -= {rank for rank in self._missing if link.check([f"{PREFIX}{rank}"])}
        known = [rank for rank in self.peers if rank not in self._missing]
        for rank, text in zip(known, link.multi_get([f"{PREFIX}{rank}" for rank in known])):
            self.peers[rank].read(text, self.clock())
        self.answered, self.lost = self.clock(), False
