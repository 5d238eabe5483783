"""How long each thread waits for bytes of files: from a disk, the Hub or a bucket.

Every thread has a sum of its own, so counting needs no lock. Whoever gives a thread work compares the sum before and
after it.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class _ReadTime(threading.local):
    seconds = 0.0


_of_thread = _ReadTime()


def read_seconds() -> float:
    """Seconds that this thread has spent reading so far."""
    return _of_thread.seconds


@contextmanager
def reading() -> Iterator[None]:
    """The time inside counts as reading."""
    started = time.perf_counter()
    before = _of_thread.seconds
    try:
        yield
    finally:
        # reads within reads are not counted twice
        _of_thread.seconds = before + time.perf_counter() - started
