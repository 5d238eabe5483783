"""Which action comes when, if chunks arrive late."""

import numpy as np
import pytest

from flexor_client import ClientError
from flexor_client.chunks import Timeline


def chunk(first: float, length: int = 8) -> np.ndarray:
    """Actions that are numbered by the count at which they are to be executed."""
    return np.arange(first, first + length, dtype=np.float32)[:, None]


def executed(timeline: Timeline, count: int) -> list:
    actions = [timeline.next() for _ in range(count)]
    return [None if action is None else float(action[0]) for action in actions]


def test_actions_that_are_over_are_left_out():
    timeline = Timeline(blend=0)
    timeline.take(chunk(0), requested_at=0)
    assert executed(timeline, 5) == [0, 1, 2, 3, 4]
    timeline.take(
        chunk(103), requested_at=3
    )  # for the moment after three actions; two more were executed meanwhile
    assert executed(timeline, 7) == [105, 106, 107, 108, 109, 110, None]


def test_while_there_is_nothing_to_execute_the_robot_stands_still():
    timeline = Timeline(blend=0)
    assert executed(timeline, 3) == [None] * 3
    timeline.take(chunk(0, 4), requested_at=0)  # so nothing of it is over
    assert executed(timeline, 4) == [0, 1, 2, 3]
    assert executed(timeline, 2) == [None] * 2
    timeline.take(chunk(3, 4), requested_at=3)  # asked for before the last action
    assert executed(timeline, 4) == [4, 5, 6, None]


def test_a_chunk_that_is_over_changes_nothing():
    timeline = Timeline(blend=0)
    timeline.take(chunk(0, 10), requested_at=0)
    executed(timeline, 5)
    timeline.take(chunk(500, 5), requested_at=0)
    assert executed(timeline, 1) == [5]


def test_blending_goes_from_the_old_to_the_new():
    timeline = Timeline(blend=3)
    timeline.take(np.zeros((8, 1), np.float32), requested_at=0)
    executed(timeline, 4)
    timeline.take(np.ones((8, 1), np.float32), requested_at=2)
    assert executed(timeline, 6) == [0.25, 0.5, 0.75, 1, 1, 1]
    timeline = Timeline(blend=3)
    timeline.take(np.zeros((4, 1), np.float32), requested_at=0)
    executed(timeline, 3)  # one is left to blend with
    timeline.take(np.ones((8, 1), np.float32), requested_at=3)
    assert executed(timeline, 3) == [0.25, 1, 1]


@pytest.mark.parametrize(
    "delay, execute, margin, asked_at", [(0, 4, 0, 4), (2, 4, 0, 2), (2, 8, 1, 5), (6, 4, 1, 1)]
)
def test_the_next_is_asked_for_in_time(delay, execute, margin, asked_at):
    timeline = Timeline(execute=execute, margin=margin)
    assert timeline.is_due()
    timeline.add_delay(delay)
    timeline.take(chunk(0), requested_at=0)
    due = []
    for _ in range(8):
        due.append(timeline.is_due())
        timeline.next()
    assert due == [count >= asked_at for count in range(8)]


def test_the_longest_of_the_last_latencies_counts_but_not_an_outlier():
    timeline = Timeline()
    assert timeline.delay == 0
    timeline.add_delay(40)  # the first may have to wait for a compiler
    assert timeline.delay == 40
    timeline.add_delay(2)
    assert timeline.delay == 2
    timeline.add_delay(3)
    assert timeline.delay == 3
    for steps in [2] * 8:
        timeline.add_delay(steps)
    assert timeline.delay == 2
    timeline.add_delay(3)
    timeline.add_delay(3)
    timeline.clear()
    assert timeline.delay == 3 and timeline.remaining() is None


@pytest.mark.parametrize("settings", [{"execute": 0}, {"margin": -1}, {"blend": -1}])
def test_settings_that_make_no_sense(settings):
    with pytest.raises(ClientError, match="must be at least"):
        Timeline(**settings)
