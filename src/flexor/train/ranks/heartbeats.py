"""The last heartbeat of every rank, exchanged through the torch.distributed store of the run.

A separate thread reads and writes: a call to the store blocks as long as the process that hosts the store is frozen,
whatever its timeout. Reading `peers` never waits for the store.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from flexor.core.log import log

if TYPE_CHECKING:
    from torch.distributed import Store

PREFIX = "flexor/watchdog/"
RANKS_PER_SECOND = 64  # every rank reads all others: with many ranks less often, to spare the store
LAST_BEATS = 3  # heartbeats that rank 0 waits at its end, so that the others can read its last one
DONE = ""


class Activity(NamedTuple):
    """What a rank is doing: the nth part of a step."""

    step: int
    nth: int
    doing: str
    unlimited: bool = False  # in time


START = Activity(0, 0, "getting ready", unlimited=True)


@dataclass
class Heartbeat:
    """What a rank reports about itself."""

    rank: int
    host: str
    activity: Activity = START
    idle: float = 0.0  # seconds without progress
    ended: str | None = None  # None: still running; DONE; or why it ended early
    received: float = 0.0  # time of its last heartbeat, on the reader's clock: the clocks of hosts differ
    count: int = -1  # grows with each heartbeat

    def silence(self, now: float) -> float:
        return now - self.received

    def to_json(self, count: int) -> str:
        return json.dumps([count, self.activity, self.idle, self.ended])

    def update(self, text: bytes, now: float) -> None:
        count, activity, idle, ended = json.loads(text)
        if count != self.count:
            self.count, self.activity = count, Activity(*activity)
            self.idle, self.ended, self.received = idle, ended, now


class Heartbeats:
    """Sends this rank's `heartbeat` to the other ranks, and reads theirs, until stopped.

    The store must belong to this start of the run, as the default store of torch.distributed does. A store that
    outlives a restart still holds the heartbeats of the earlier ranks.
    """

    def __init__(
        self,
        heartbeat: Callable[[], Heartbeat],
        hosts: Sequence[str],
        store: Store,
        clock: Callable[[], float],
        every_s: float,
    ):
        self.heartbeat, self.store, self.clock = heartbeat, store, clock
        self.peers = {
            rank: Heartbeat(rank, host) for rank, host in enumerate(hosts) if rank != heartbeat().rank
        }
        self.every_s = max(every_s, len(hosts) / RANKS_PER_SECOND)
        self.answered = 0.0  # when the store last answered
        self.lost = False  # the connection to the store is broken; a frozen store only stops answering
        self._missing = set(self.peers)  # reading a key that is not set yet would block
        self._connection: Store | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def start(self) -> None:
        """Connect, then start the thread. Connecting may take seconds (DNS), and the run may end soon after."""
        with suppress(RuntimeError):  # the thread tries again, and sets `lost`
            self._connect()
        self._thread.start()

    def stop(self) -> None:
        """Send a last heartbeat and end the thread, which could disturb the shutdown of the interpreter."""
        self._stop.set()
        self._thread.join(1 + LAST_BEATS * self.every_s)

    def _run(self) -> None:
        try:
            for count in itertools.count():
                last = self._stop.is_set()
                self._exchange(count, read=not last)
                if last:
                    break
                self._stop.wait(self.every_s)
            if self.heartbeat().rank == 0:
                self._wait_for_readers(count)
        except Exception:
            log.exception("The heartbeats of this rank stopped: the other ranks will take it for dead.")

    def _wait_for_readers(self, count: int) -> None:
        """The store may end with rank 0: wait until the others have read its last heartbeat, or have ended."""
        limit = LAST_BEATS * self.every_s
        until = time.monotonic() + limit
        while not self.lost and time.monotonic() < until and self._any_alive(limit):
            time.sleep(self.every_s / 10)
            self._exchange(count, read=True)

    def _any_alive(self, silent_s: float) -> bool:
        return any(p.ended is None and p.silence(self.clock()) < silent_s for p in self.peers.values())

    def _exchange(self, count: int, read: bool) -> None:
        try:
            store, heartbeat = self._connection or self._connect(), self.heartbeat()
            store.set(f"{PREFIX}{heartbeat.rank}", heartbeat.to_json(count))
            if read:
                self._read_peers(store)
        except RuntimeError:
            self._connection, self.lost = None, True

    def _connect(self) -> Store:
        """A separate connection: on a shared one, this thread would wait for calls of the main thread."""
        clone = getattr(self.store, "clone", lambda: self.store)  # torch 2.7 has none
        self._connection = clone()
        return self._connection

    def _read_peers(self, store: Store) -> None:
        self._missing -= {rank for rank in self._missing if store.check([f"{PREFIX}{rank}"])}
        ranks = [rank for rank in self.peers if rank not in self._missing]
        for rank, text in zip(ranks, store.multi_get([f"{PREFIX}{rank}" for rank in ranks])):
            self.peers[rank].update(text, self.clock())
        self.answered, self.lost = self.clock(), False
