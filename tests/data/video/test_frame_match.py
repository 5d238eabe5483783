"""Which frame of a video is a row's: by time, or by index where there is a frame for every row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexor.data.video.frame_match import NoMatch, match_frames, nearest, own_frames

FPS = 10
ALONE = float("nan")


def match(times, clock, start=0.0, stop=ALONE, frame_by="auto", tolerance=0.05):
    return match_frames(
        np.asarray(times), np.asarray(clock, np.float32), start, stop, FPS, tolerance, frame_by
    )


def steady(count, start=0.0):
    return start + np.arange(count) / FPS


def test_a_sound_clock_leads_to_the_frames_either_way():
    for frame_by in ("auto", "time", "index"):
        matched = match(steady(8), steady(8), frame_by=frame_by)
        assert matched.numbers.tolist() == list(range(8)) and matched.seconds_off == 0


@given(
    rows=st.integers(1, 40), before=st.integers(0, 30), after=st.integers(0, 30), seed=st.integers(0, 9999)
)
def test_a_wall_clock_of_any_kind_is_no_obstacle_where_each_row_has_a_frame(rows, before, after, seed):
    """Also in a file that other episodes share, wherever in it."""
    clock = np.random.default_rng(seed).uniform(-5, 5, rows)
    times = steady(before + rows + after)
    matched = match(times, clock, start=before / FPS, stop=(before + rows) / FPS)
    assert matched.numbers.tolist() == list(range(before, before + rows))
    expected = np.abs(steady(rows) - clock.astype(np.float32)).max()
    same = (nearest(times, before / FPS + clock.astype(np.float32))[0] == matched.numbers).all()
    assert matched.seconds_off == pytest.approx(0 if same else expected, abs=1e-6)


@given(frames=st.integers(1, 60), rows=st.integers(1, 60), late=st.integers(0, 20))
def test_where_the_counts_differ_time_decides_and_is_never_stretched(frames, rows, late):
    """A row gets the frame at its time, or none at all."""
    clock = steady(rows, late / FPS)
    if frames == rows:
        return
    if late + rows <= frames:
        assert match(steady(frames), clock).numbers.tolist() == list(range(late, late + rows))
    else:
        with pytest.raises(NoMatch, match=f"of {rows} rows have no frame"):
            match(steady(frames), clock)


def test_another_episodes_frames_are_not_taken():
    """A clock that starts late in a file that goes on with another episode."""
    with pytest.raises(NoMatch, match="3 of 5 rows"):
        match(steady(20), steady(5, 0.3), start=0.5, stop=0.9)  # its span says 4 frames
    assert match(steady(20), steady(5), start=0.5, stop=0.9).numbers.tolist() == [5, 6, 7, 8, 9]


def test_time_by_choice():
    assert match(steady(5), [0.0, 0.1, 0.1, 0.3, 0.4], frame_by="time").numbers.tolist() == [0, 1, 1, 3, 4]
    with pytest.raises(NoMatch, match=r"1 of 5 rows .*first row 2, 1.600 s off"):
        match(steady(5), [0.0, 0.1, 2.0, 0.3, 0.4], frame_by="time")


def test_time_is_refused_if_the_clock_drifts_and_every_row_has_a_frame():
    slow = np.arange(12) * 0.1 * 0.95  # 5 % off: half a frame from row 11 on
    assert match(steady(12), slow[:10], stop=1.0, frame_by="time").numbers.tolist() == list(range(10))
    with pytest.raises(NoMatch, match=r"drift more than half a frame .* use dataset\.frame_by=auto"):
        match(steady(12), slow, frame_by="time")
    assert match(steady(12), slow).numbers.tolist() == list(range(12))
    lost = [0.0, 0.1, 0.4, 0.5]  # two rows are missing, but not their frames: time is right
    assert match(steady(6), lost, frame_by="time").numbers.tolist() == [0, 1, 4, 5]


def test_index_by_choice():
    assert match(steady(9), steady(5, 0.4), frame_by="index").numbers.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(NoMatch, match="4 frames for 5 rows"):
        match(steady(4), steady(5), frame_by="index")


def test_a_clock_that_is_no_number():
    assert match(steady(3), [np.nan, 0.1, np.inf]).numbers.tolist() == [0, 1, 2]
    with pytest.raises(NoMatch, match="1 of 3 rows"):
        match(steady(4), [0.0, np.nan, 0.2])


@given(st.lists(st.integers(0, 99), min_size=1, max_size=30, unique=True), st.floats(-1, 11))
def test_nearest(ticks, expected):
    times = np.sort(np.array(ticks)) / 10
    frame, distance = nearest(times, np.array([expected]))
    assert distance[0] == np.abs(times - expected).min() and frame[0] == np.abs(times - expected).argmin()


def test_own_frames():
    assert own_frames(steady(6), 0.0, ALONE, FPS) == (0, 6)
    assert own_frames(steady(30), 1.0, 1.7, FPS) == (10, 17)
    assert own_frames(steady(30), 1.0004, 1.7004, FPS) == (10, 17)  # as rounded by who wrote it
