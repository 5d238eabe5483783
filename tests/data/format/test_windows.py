import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexor.core.errors import ConfigError
from flexor.data.format.windows import deltas_from_timestamps, window_rows


@st.composite
def windows(draw):
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=6))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    rows = np.array(draw(st.lists(st.integers(0, int(ends[-1]) - 1), min_size=1, max_size=8)))
    deltas = draw(st.lists(st.integers(-30, 30), min_size=1, max_size=10))
    episode = np.searchsorted(ends, rows, side="right")
    return rows, deltas, starts[episode], ends[episode]


@given(windows())
def test_a_window_stays_in_its_episode_and_marks_what_lies_outside(case):
    rows, deltas, start, end = case
    at, is_pad = window_rows(rows, deltas, start, end)
    assert at.shape == is_pad.shape == (len(rows), len(deltas))
    for i, row in enumerate(rows):  # the same, one step at a time
        for j, delta in enumerate(deltas):
            unclamped = row + delta
            assert at[i, j] == max(start[i], min(end[i] - 1, unclamped))
            assert is_pad[i, j] == (not start[i] <= unclamped < end[i])


@given(windows())
def test_delta_zero_is_the_row_itself(case):
    rows, _, start, end = case
    at, is_pad = window_rows(rows, [0], start, end)
    assert (at[:, 0] == rows).all() and not is_pad.any()


@given(st.lists(st.integers(-2000, 2000), max_size=20), st.sampled_from([5, 10, 24, 29.97, 30, 50, 60, 1000]))
def test_timestamps_round_to_the_frames_they_came_from(frames, fps):
    assert deltas_from_timestamps([n / fps for n in frames], fps) == frames


def test_a_timestamp_within_tolerance_is_rounded():
    assert deltas_from_timestamps([0.10005, -0.09995], 10) == [1, -1]


@pytest.mark.parametrize("seconds", [0.05, 0.1002, -0.0333])
def test_a_timestamp_between_frames_is_refused(seconds):
    with pytest.raises(ConfigError, match=r"not multiples of 1/10 s.*10 frames per second"):
        deltas_from_timestamps([0.0, seconds], 10)
