"""For which robots a request waits, so that they are predicted for together."""

import asyncio
import math
import time

import pytest

from flexor.serve import batching
from flexor.serve.batching import RequestBatcher, RobotPauses
from flexor.serve.job import ServeJob
from flexor.serve.request import PolicyRequest
from support.limits import FOREVER_S, LIMIT_S

PREDICTION_S = 0.01


def job(session: str) -> ServeJob:
    return ServeJob(PolicyRequest({}, False, "", None), session, 0.0)


def test_a_pause_is_judged_by_the_last_two():
    pauses = RobotPauses()
    assert pauses.end() == math.inf
    for asked_at, answered_at in [(1.0, 2.0), (2.5, 3.0), (9.0, 9.1), (9.4, 10.0)]:
        pauses.ask(asked_at)
        pauses.answer(answered_at)
    assert [*pauses.last] == pytest.approx([6.0, 0.3])  # one long pause is not the usual one
    assert pauses.end() == pytest.approx(10.3)


class Clock:
    """In the place of the batcher's time: it stands still unless it is told."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(batching, "time", clock)
    return clock


def robot_that_asks_again(batcher: RequestBatcher, name: str, answered: float, pause: float) -> None:
    pauses = batcher.pauses[name] = RobotPauses()
    pauses.last.append(pause)
    pauses.answer(answered)


@pytest.mark.parametrize(
    ("pause", "answered", "waits"),
    [
        (0.005, 100.0, True),  # it asks in the time of a prediction
        (0.5, 100.0, False),  # it does not
        (0.5, 99.505, True),  # it usually does not, but now
        (0.005, 99.99, True),  # it is a little late
        (0.005, 99.9, False),  # it is so late that it may have ended
    ],
)
def test_a_request_waits_for_robots_that_ask_before_a_prediction_would_end(clock, pause, answered, waits):
    batcher = RequestBatcher(lambda jobs: None, 8, None)
    robot_that_asks_again(batcher, "other", answered, pause)
    until = clock.now + PREDICTION_S
    assert batcher._others_come(until, PREDICTION_S) is waits
    clock.now = until
    assert not batcher._others_come(until, PREDICTION_S)  # nobody waits longer than that


def test_with_a_window_a_request_waits_for_every_active_robot(clock):
    batcher = RequestBatcher(lambda jobs: None, 8, 0.02)
    robot_that_asks_again(batcher, "other", clock.now - 0.9, 0.5)
    assert batcher._others_come(clock.now + 0.02, 0.02)
    clock.now += 0.2
    assert not batcher._others_come(clock.now + 0.02, 0.02)  # it was not active for a second


def test_robots_that_ask_again_at_once_are_predicted_for_together():
    """Even though they began one after the other; without waiting there would be two groups for ever."""
    sizes: list[int] = []

    def answer(jobs: list[ServeJob]) -> None:
        sizes.append(len(jobs))

    async def robot(batcher: RequestBatcher, name: str, begins: int) -> None:
        while len(sizes) < begins:
            await asyncio.sleep(0.001)
        while True:
            await batcher.submit(job(name))
            await asyncio.sleep(0.02)

    async def run() -> None:
        batcher = RequestBatcher(answer, 8, None)
        batcher.fastest = lambda: LIMIT_S  # type: ignore[method-assign]
        tasks = [asyncio.create_task(robot(batcher, str(n), n)) for n in range(3)]
        tasks.append(asyncio.create_task(batcher.run()))
        while sizes.count(3) < 10 and len(sizes) < 50:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        batcher.thread.shutdown()

    asyncio.run(run())
    assert sizes.count(3) >= 10


def test_nobody_waits_for_others_beyond_a_deadline():
    async def run() -> ServeJob:
        batcher = RequestBatcher(lambda jobs: None, 8, window_s=FOREVER_S)
        batcher.fastest = lambda: LIMIT_S  # type: ignore[method-assign]
        batcher.pauses["other"] = RobotPauses()
        batcher.pauses["other"].answer(time.perf_counter() + FOREVER_S)  # active, and never asks
        worker = asyncio.create_task(batcher.run())
        hasty = job("hasty")
        hasty.due = time.perf_counter() + 2 * LIMIT_S + 0.5  # leaves half a second to wait for others
        await batcher.submit(hasty)
        worker.cancel()
        batcher.thread.shutdown()
        return hasty

    assert not asyncio.run(run()).expired
