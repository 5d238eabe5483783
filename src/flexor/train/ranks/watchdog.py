"""The watchdog ends a run in which a rank makes no progress, and reports which rank hangs, where and why.

A thread checks this rank about once a second. After `timeout_s` without progress it names the rank that is behind,
prints the stacks of this process and ends it, because a process that is stuck in a collective can't be unwound.
Slow work is no hang: while any rank is in `without_limit`, it is enough that all ranks send heartbeats. Time in which
the whole process was suspended does not count.

| Problem | Which ranks end, and when |
| --- | --- |
| A rank makes no progress | that rank after `timeout_s`; the ranks that wait for it a few seconds later |
| A rank is dead or frozen | the others after `timeout_s`, or earlier if a collective fails |
| A rank ended with an error, or the store is gone | the others after a minute, or `timeout_s` if that is less |

The watchdog does not end a run of one process. It prints the message and the stacks every `timeout_s`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flexor.core.errors import FlexorError
from flexor.core.log import log
from flexor.train.ranks.heartbeats import DONE, START, Activity, Heartbeat, Heartbeats

if TYPE_CHECKING:
    from torch.distributed import Store

HUNG = 70  # exit code of a process that its watchdog ended (EX_SOFTWARE)
STOPPED = 75  # exit code of a process that a signal stopped
TICK_S = 1.0
GONE_S = 60.0  # how long to wait for a rank that has ended
GRACE_S = 5.0  # the rank that hangs prints its own stack before the ranks that wait for it end too
MOST_NAMED = 8  # ranks in one message
LOG_S = 300.0  # between two log lines of a rank that does slow work


class RankLost(FlexorError):
    """A collective failed because of another rank."""

    exit_code = HUNG


class Watchdog:
    """Watches this rank, and knows from heartbeats what the other ranks are doing.

    Every rank must call `beat` equally often in a step: a rank with fewer calls is behind. Collectives need a longer
    timeout than `timeout_s`; otherwise they fail before it is known which rank they wait for. All ranks must leave the
    watchdog together (after a barrier), since the store may end with rank 0.
    """

    def __init__(self, rank: int, hosts: Sequence[str], store: Store | None, timeout_s: float):
        """`hosts`: the name of every rank's host."""
        assert len(hosts) == 1 or store is not None
        self.rank, self.host, self.timeout_s = rank, hosts[rank], timeout_s
        self._tick = min(TICK_S, timeout_s / 10)
        self._now = 0.0  # seconds that this process has been running, not stopped
        self._activity = self._checked = START
        self._progress = self._entered = self._logged = 0.0  # last progress, activity and log line
        self._ended: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._stack_timer = StackTimer()
        self._heartbeats: Heartbeats | None = None
        if store is not None and len(hosts) > 1:
            self._heartbeats = Heartbeats(self._heartbeat, hosts, store, lambda: self._now, self._tick)

    def beat(self, step: int, doing: str) -> None:
        """This rank starts the next part of a step. Cheap, for the hot loop: it only stores this."""
        last = self._activity
        self._activity = Activity(step, last.nth + 1 if step == last.step else 0, doing)

    def lift_limit(self, doing: str) -> None:
        """Slow work without a time limit, until the next beat. Ranks that wait for it do not time out either."""
        self._activity = self._activity._replace(doing=doing, unlimited=True)

    @contextmanager
    def without_limit(self, doing: str) -> Iterator[None]:
        """The same, until the end of the block. If an error ends it, the report says what this rank was doing."""
        before = self._activity
        self.lift_limit(doing)
        yield
        # a new object, even if its values are the same: that counts as progress
        self._activity = self._activity._replace(doing=before.doing, unlimited=before.unlimited)

    def __enter__(self) -> Watchdog:
        if self._heartbeats:
            self._stack_timer.install()
            self._heartbeats.start()
        self._thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        culprit = self._find_failed() if self._heartbeats and _is_from_collective(error) else None
        self._ended = DONE if error is None else culprit or f"{type(error).__name__}: {error}".splitlines()[0]
        self._stop.set()
        self._thread.join(10)
        self._stack_timer.remove()
        if self._heartbeats:
            self._heartbeats.stop()
        if culprit:
            lost = RankLost(f"{culprit}\n{self._describe()}: {str(error).split('. ')[0]}")
            if "TrainingStopped: " in culprit:  # before the first step; later all stop together
                lost.exit_code = STOPPED
            raise lost from error
        if error is not None and not isinstance(error, FlexorError):
            error.add_note(f"{self._describe()}.")  # printed below its stack

    # The thread

    def _watch(self) -> None:
        try:
            last = time.monotonic()
            while not self._stop.is_set():
                self._stack_timer.start(self.timeout_s)
                now = time.monotonic()
                self._now += min(now - last, 3 * self._tick)
                last = now
                self._check()
                self._stop.wait(self._tick)
        except Exception:
            log.exception("The watchdog of this rank stopped: if the run hangs, it will not be reported.")

    def _check(self) -> None:
        activity = self._activity
        if activity is not self._checked:
            self._checked = activity
            self._progress = self._entered = self._logged = self._now
        peers = [peer for peer in self._peers().values() if peer.ended != DONE]
        if activity.unlimited or any(peer.activity.unlimited for peer in peers):
            self._progress = max(self._progress, min((peer.received for peer in peers), default=self._now))
        if activity.unlimited and self._now - self._logged >= LOG_S:
            self._logged = self._now
            minutes = (self._now - self._entered) / 60
            log.info("rank %d: still %s after %d min", self.rank, activity.doing, minutes)
        lost = self._heartbeats is not None and self._heartbeats.lost
        limit = min(self.timeout_s, GONE_S) if lost or any(peer.ended for peer in peers) else self.timeout_s
        if self._now - self._progress > limit:
            self._report_hang(limit)

    def _report_hang(self, limit: float) -> None:
        """Report which rank hangs, and end this process; one of a single process runs on."""
        gone = self._gone(limit / 2)
        culprits, verdict = gone or self._behind()
        if self.rank not in culprits and self._now - self._progress <= limit + GRACE_S:
            return
        hint = "" if gone else f" If this can take so long, raise --parallel.timeout_s ({self.timeout_s:g})."
        _print(f"\n{verdict}{hint}\n{self._describe()}. Stacks of its threads:\n{_stacks()}\n")
        if self._heartbeats is None:
            self._progress = self._now
            return
        self._ended = verdict
        self._heartbeats.stop()
        os._exit(HUNG)

    # Which rank is the cause

    def _heartbeat(self) -> Heartbeat:
        idle = self._now - self._progress
        return Heartbeat(self.rank, self.host, self._activity, idle, self._ended, self._now)

    def _peers(self) -> dict[int, Heartbeat]:
        return self._heartbeats.peers if self._heartbeats else {}

    def _gone(self, silent_s: float) -> tuple[list[int], str] | None:
        """The ranks that ended early, are dead or are frozen, and a sentence about them."""
        if self._heartbeats is None:
            return None
        peers = self._heartbeats.peers.values()
        failed = [peer for peer in peers if peer.ended]
        if failed:
            first = min(failed, key=lambda peer: peer.received)
            return [first.rank], f"{_name(first)} has ended at {_place(first)}: {first.ended}"
        answered = self._heartbeats.answered
        if self._now - answered > silent_s:
            host = "this host" if self.rank == 0 else self._heartbeats.peers[0].host
            return [0], (
                f"The torch.distributed store of this run, hosted by rank 0 on {host} or its launcher, has not "
                f"answered for {self._now - answered:.0f} s: that process is dead or frozen, or its host is "
                "down or cut off."
            )
        # up to the last answer of the store: it has not sent later heartbeats
        silent = [peer for peer in peers if peer.ended is None and peer.silence(answered) > silent_s]
        if silent:
            return [peer.rank for peer in silent], (
                f"{_names(silent)} {_have(silent)} sent no heartbeat for {silent[0].silence(answered):.0f} s: dead, "
                f"frozen or cut off, last seen at {_place(silent[0])}."
            )
        return None

    def _behind(self) -> tuple[list[int], str]:
        """The ranks with the least progress, and a sentence about them and the ranks that wait for them."""
        ranks = [rank for rank in [*self._peers().values(), self._heartbeat()] if rank.ended is None]
        ranks.sort(key=lambda rank: rank.rank)
        limited = [rank for rank in ranks if not rank.activity.unlimited] or ranks
        least = min(rank.activity[:2] for rank in limited)
        behind = [rank for rank in limited if rank.activity[:2] == least]
        waiting = [rank.rank for rank in ranks if rank not in behind]
        return [rank.rank for rank in behind], (
            f"{_names(behind)} {_have(behind)} made no progress for "
            f"{max(rank.idle + rank.silence(self._now) for rank in behind):.0f} s: {_place(behind[0])}."
            + (f" {_numbers(waiting)} for {'it' if len(behind) == 1 else 'them'}." if waiting else "")
        )

    def _find_failed(self) -> str | None:
        """After a failed collective: wait until the heartbeats show which rank caused it."""
        assert self._heartbeats is not None
        self._activity = self._activity._replace()  # progress: this wait gets its own time limit
        for _ in range(16):
            gone = self._gone(silent_s=5 * self._heartbeats.every_s)
            if gone:
                return gone[1]
            time.sleep(self._heartbeats.every_s / 2)
        behind, verdict = self._behind()  # the collective timed out before the watchdog
        return None if self.rank in behind else verdict

    def _describe(self) -> str:
        return f"This is rank {self.rank} on {self.host}, at {_place(self._heartbeat())}"


class StackTimer:
    """Prints the main thread's stack when time is up, also if some code never releases the interpreter lock (GIL).

    Its clock also runs while the process is suspended, so it may print one stack too many when the process goes on. A
    timer of `faulthandler` prints all threads' stacks from a thread of its own, which crashes where they run meanwhile.
    """

    installed = False

    def install(self) -> None:
        """Nothing happens if the program uses this signal itself."""
        if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
            faulthandler.register(signal.SIGALRM, file=2, all_threads=False)
            self.installed = True

    def start(self, seconds: float) -> None:
        """Start again."""
        if self.installed:
            signal.setitimer(signal.ITIMER_REAL, seconds)

    def remove(self) -> None:
        if self.installed:
            self.installed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.unregister(signal.SIGALRM)


def _is_from_collective(error: BaseException | None) -> bool:
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _name(rank: Heartbeat) -> str:
    return f"rank {rank.rank} on {rank.host}"


def _names(ranks: Sequence[Heartbeat]) -> str:
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return ", ".join(map(_name, ranks[:MOST_NAMED])) + more


def _have(ranks: Sequence[Heartbeat]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _place(rank: Heartbeat) -> str:
    return f"step {rank.activity.step}, {rank.activity.doing}"


def _numbers(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]} waits"
    if len(ranks) > MOST_NAMED:
        return f"{len(ranks)} ranks wait"
    return f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} wait"


def _stacks() -> str:
    """The stack of every thread of this process. Reads no source files: their disk may be what hangs."""
    lines = []
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    frames.pop(threading.get_ident())
    for ident, top in sorted(frames.items(), key=lambda item: item[0] != threading.main_thread().ident):
        lines.append(f"{names.get(ident, ident)} (most recent call first):")
        frame = top
        while frame is not None:
            lines.append(f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}")
            frame = frame.f_back  # type: ignore[assignment]
    return "\n".join(lines)


def _print(text: str) -> None:
    """Print in one piece, so that the output of ranks does not mix. A pipe that nobody reads does not block us."""
    writer = threading.Thread(target=os.write, args=(2, text.encode()), daemon=True)
    writer.start()
    writer.join(10)
