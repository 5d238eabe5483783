"""Collects requests that come close together, and hands them to the model's thread as one batch."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from flexor.serve.job import ServeJob

ACTIVE_S = 1.0  # a robot that was answered within this time is expected to ask again
REMEMBERED = 32  # predictions, to know how long one takes
SHARE = 0.1  # of the time of a prediction that is spent on waiting for others, unless a time is set


class RequestBatcher:
    """One queue for all clients. Only the event loop uses it, except for `answer`."""

    def __init__(self, answer: Callable[[Sequence[ServeJob]], None], most: int, window_s: float | None):
        self.answer, self.most, self.window_s = answer, most, window_s
        # torch's number of threads is a setting of each thread: the model's gets that of this one
        threads = torch.get_num_threads()
        self.thread = ThreadPoolExecutor(1, "model", torch.set_num_threads, (threads,))
        self.waiting: deque[tuple[ServeJob, asyncio.Future[None]]] = deque()
        self.changed = asyncio.Event()
        self.seen: dict[object, float] = {}  # session -> when it asked or was answered last
        self.took: deque[float] = deque(maxlen=REMEMBERED)
        self.trust = 1.0  # in what is remembered of it
        self.free_since = 0.0  # the model's thread

    async def submit(self, job: ServeJob) -> None:
        """Return when the job is answered or has expired."""
        job.queued = time.perf_counter()
        self.seen[job.session] = job.queued
        if self._too_late(job):
            job.expired = True
            return
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append((job, answered))
        self.changed.set()
        await answered

    def forget(self, session: object) -> None:
        self.seen.pop(session, None)

    def fastest(self) -> float:
        """How long a prediction takes at least, in seconds, as far as is known."""
        return self.trust * min(self.took, default=0.0)

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
                for job, _ in batch:
                    job.error = job.error or f"The server failed: {type(error).__name__}."
            now = self.free_since = time.perf_counter()
            self.took.append(now - started)
            self.trust = 1.0
            for job, answered in batch:
                if job.session in self.seen:
                    self.seen[job.session] = now
                if not answered.done():
                    answered.set_result(None)

    async def _wait_for_others(self) -> None:
        """Until all robots that are expected have asked, but not longer than the window.

        It begins when the model is free, for robots that asked before: those just answered ask again in a moment.
        Otherwise robots would fall into groups that wait for each other.
        """
        window = SHARE * self.fastest() if self.window_s is None else self.window_s
        until = max(self.waiting[0][0].queued, self.free_since) + window
        while len(self.waiting) < min(self.most, self._expected()):
            left = until - time.perf_counter()
            if left <= 0:
                return
            self.changed.clear()
            try:
                await asyncio.wait_for(self.changed.wait(), left)
            except TimeoutError:
                return

    def _expected(self) -> int:
        since = time.perf_counter() - ACTIVE_S
        return sum(when >= since for when in self.seen.values())

    def _take(self) -> list[tuple[ServeJob, asyncio.Future[None]]]:
        """The next batch, without those whose robots are gone or whose time is over."""
        batch: list[tuple[ServeJob, asyncio.Future[None]]] = []
        while self.waiting and len(batch) < self.most:
            job, answered = self.waiting.popleft()
            if not job.alive() or self._too_late(job):
                job.expired = True
                answered.set_result(None)
            else:
                batch.append((job, answered))
        return batch

    def _too_late(self, job: ServeJob) -> bool:
        if job.due is None or time.perf_counter() + self.fastest() <= job.due:
            return False
        self.trust *= 0.9  # a model that was slow once is tried again
        return True
