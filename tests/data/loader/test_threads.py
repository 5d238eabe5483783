import threading

import pytest

from flexor.data.loader.threads import ReaderThreads
from support.limits import LIMIT_S


@pytest.mark.parametrize("threads", [1, 3])
def test_the_most_urgent_job_is_next(threads):
    crew, done, gate = ReaderThreads(threads, "test"), [], threading.Event()
    for _ in range(threads):
        crew.submit((0,), gate.wait)  # keep everybody busy while jobs queue up
    for priority in [(5, 1), (2, 1), (2, 0), (9, 0), (1, 0)]:
        crew.submit(priority, lambda priority=priority: done.append(priority))
    finished = threading.Event()
    crew.submit((10,), finished.set)
    gate.set()
    assert finished.wait(LIMIT_S)
    crew.close()
    assert sorted(done) == [(1, 0), (2, 0), (2, 1), (5, 1), (9, 0)]
    assert threads > 1 or done == sorted(done)


def test_without_threads_the_caller_works():
    done = []
    ReaderThreads(0, "test").submit((1,), lambda: done.append(threading.current_thread()))
    assert done == [threading.current_thread()]


def test_closing_drops_what_waits_and_leaves_no_thread():
    crew, done, gate, started = ReaderThreads(1, "closing"), [], threading.Event(), threading.Event()
    crew.submit((0,), lambda: (started.set(), gate.wait()))
    for i in range(5):
        crew.submit((i,), lambda i=i: done.append(i))
    assert started.wait(LIMIT_S)
    threading.Timer(0.05, gate.set).start()
    crew.close()
    assert done == []
    assert not [t for t in threading.enumerate() if t.name.startswith("closing")]
