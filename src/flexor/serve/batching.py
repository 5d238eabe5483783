"""Collects requests that come close together, and hands them to the model's thread as one batch."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from flexor.core.log import log
from flexor.serve.job import ServeJob

ACTIVE_S = 1.0  # a robot that was answered within this time is expected to ask again, if a window is set
REMEMBERED = 32  # predictions, to know how long one takes


class RobotPauses:
    """When a robot asks again after an answer, judged by its last pauses."""

    def __init__(self) -> None:
        self.waits = False  # for an answer
        self.since = 0.0  # it waits or pauses
        self.last: deque[float] = deque(maxlen=2)

    def ask(self, now: float) -> None:
        if self.since and not self.waits:
            self.last.append(now - self.since)
        self.waits, self.since = True, now

    def answer(self, now: float) -> None:
        self.waits, self.since = False, now

    def end(self) -> float:
        """When it asks next. A single long pause, as between two episodes, does not count."""
        return self.since + min(self.last, default=math.inf)


class RequestBatcher:
    """One queue for all clients. Only the event loop uses it, except for `answer`."""

    def __init__(self, answer: Callable[[Sequence[ServeJob]], None], max_batch: int, window_s: float | None):
        self.answer, self.max_batch, self.window_s = answer, max_batch, window_s
        # torch's number of threads is a setting of each thread: the model's gets that of this one
        threads = torch.get_num_threads()
        self.thread = ThreadPoolExecutor(1, "model", torch.set_num_threads, (threads,))
        self.waiting: deque[tuple[ServeJob, asyncio.Future[None]]] = deque()
        self.changed = asyncio.Event()
        self.pauses: dict[object, RobotPauses] = {}  # of each session
        self.durations: deque[float] = deque(maxlen=REMEMBERED)
        self.trust = 1.0  # in what is remembered of it
        self.free_since = 0.0  # the model's thread

    async def submit(self, job: ServeJob) -> None:
        """Return when the job is answered or has expired: at its deadline, whatever the model is doing then."""
        job.queued = time.perf_counter()
        self.pauses.setdefault(job.session, RobotPauses()).ask(job.queued)
        if self._too_late(job):
            self._expire(job)
            return
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append((job, answered))
        self.changed.set()
        remaining_s = None if job.due is None else max(0.0, job.due - time.perf_counter())
        await asyncio.wait([answered], timeout=remaining_s)
        if not answered.done():
            self._expire(job)
            self._abandon(job, answered)

    def _abandon(self, job: ServeJob, answered: asyncio.Future[None]) -> None:
        """Take a job out of the queue. If the model is at it already, its observation is in use until that ends."""
        try:
            self.waiting.remove((job, answered))
        except ValueError:
            job.in_use = True
            answered.add_done_callback(lambda _: job.release())

    def forget(self, session: object) -> None:
        self.pauses.pop(session, None)

    def fastest(self) -> float:
        """How long a prediction takes at least, in seconds, as far as is known."""
        return self.trust * min(self.durations, default=0.0)

    async def run(self) -> None:
        """Answer requests until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            while not self.waiting:
                self.changed.clear()
                await self.changed.wait()
            await self._wait_for_others()
            batch = self._take()
            if not batch:
                continue
            started = time.perf_counter()
            try:
                await loop.run_in_executor(self.thread, self.answer, [job for job, _ in batch])
            except Exception as error:
                log.exception("A batch of %d requests failed", len(batch))
                for job, _ in batch:
                    job.error = job.error or f"The server failed: {type(error).__name__}."
            now = self.free_since = time.perf_counter()
            self.durations.append(now - started)
            self.trust = 1.0
            for job, answered in batch:
                if job.session in self.pauses and not job.expired:
                    self.pauses[job.session].answer(now)
                if not answered.done():
                    answered.set_result(None)

    async def _wait_for_others(self) -> None:
        """Until all robots that are expected have asked, but not longer than the window, or than deadlines allow.

        It begins when the model is free, for robots that asked before: those just answered ask again in a moment.
        Otherwise robots would fall into groups that wait for each other.
        """
        window = self.fastest() if self.window_s is None else self.window_s
        until = max(self.waiting[0][0].queued, self.free_since) + window
        needed = 2 * self.fastest()  # by robots with a deadline: of several, a prediction takes longer
        while len(self.waiting) < self.max_batch:
            until = min([until, *(job.due - needed for job, _ in self.waiting if job.due is not None)])
            if not self._others_come(until, window):
                return
            self.changed.clear()
            try:
                await asyncio.wait_for(self.changed.wait(), until - time.perf_counter())
            except TimeoutError:
                return

    def _others_come(self, until: float, window: float) -> bool:
        """Whether a robot is expected by then: it would have to wait for this prediction if it did not take part."""
        now = time.perf_counter()
        idle = [pauses for pauses in self.pauses.values() if not pauses.waits]
        if self.window_s is not None:
            return now < until and any(pauses.since >= now - ACTIVE_S for pauses in idle)
        return now < until and any(now - window <= pauses.end() <= until for pauses in idle)

    def _take(self) -> list[tuple[ServeJob, asyncio.Future[None]]]:
        """The next batch, without those whose robots are gone or whose time is over."""
        batch: list[tuple[ServeJob, asyncio.Future[None]]] = []
        while self.waiting and len(batch) < self.max_batch:
            job, answered = self.waiting.popleft()
            if not job.alive() or self._too_late(job):
                self._expire(job)
                answered.set_result(None)
            else:
                batch.append((job, answered))
        return batch

    def _expire(self, job: ServeJob) -> None:
        job.expired = True
        if job.session in self.pauses:
            self.pauses[job.session].answer(time.perf_counter())

    def _too_late(self, job: ServeJob) -> bool:
        if job.due is None or time.perf_counter() + self.fastest() <= job.due:
            return False
        self.trust *= 0.9  # a model that was slow once is tried again
        return True
