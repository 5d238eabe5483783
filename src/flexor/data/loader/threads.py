"""Threads that do the most urgent work first."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from itertools import count


class ReaderThreads:
    """Runs jobs in a few threads, lowest priority number first; with 0 threads, immediately in the caller.

    Jobs handle their own errors. Closing drops jobs that have not started and waits for the others.
    """

    def __init__(self, threads: int, name: str):
        self._jobs: list[tuple[tuple[int, ...], int, Callable[[], None]]] = []
        self._ready = threading.Condition()
        self._closed = False
        self._tie = count()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, priority: tuple[int, ...], job: Callable[[], None]) -> None:
        if not self._threads:
            job()
            return
        with self._ready:
            heapq.heappush(self._jobs, (priority, next(self._tie), job))
            self._ready.notify()

    def close(self) -> None:
        with self._ready:
            self._closed = True
            self._jobs.clear()
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._ready:
                while not self._jobs and not self._closed:
                    self._ready.wait()
                if self._closed:
                    return
                _, _, job = heapq.heappop(self._jobs)
            job()
            del job  # otherwise the thread would keep references of the job until the next one arrives
