"""Matches the frames of a video to the rows of an episode.

By time: the frame nearest to the row's timestamp. By index: frame i is row i, regardless of timestamps. Robots
often write the wall clock into `timestamp`, while the video has exactly one frame per row at a constant rate. So by
default, frames are matched by index if the video has exactly one frame per row of the episode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

FrameBy = Literal["auto", "time", "index"]


@dataclass(frozen=True)
class FrameMatch:
    """The frames of an episode's rows."""

    numbers: np.ndarray  # [n] frames of the video in display order, one for each row
    seconds_off: float
    """Largest error of the timestamps; 0 if they select the same frames."""


class NoMatch(ValueError):
    """Some rows have no frame; the message says how many and why."""


def own_frames(times: np.ndarray, start: float, stop: float, fps: float) -> tuple[int, int]:
    """(first, end) of an episode's frames in `times` [F], ascending. `stop` is nan if the file has no other episode."""
    if np.isnan(stop):
        return 0, len(times)
    half = 0.5 / fps
    first, end = np.searchsorted(times, [start - half, stop - half])
    return int(first), int(end)


def match_frames(
    times: np.ndarray,
    clock: np.ndarray,
    start: float,
    stop: float,
    fps: float,
    tolerance: float,
    frame_by: FrameBy = "auto",
) -> FrameMatch:
    """The frame of every row.

    `times` [F] of the file's frames and `clock` [n] of the rows are in seconds. The episode's clock is zero at
    `start` in the file, and its frames end at `stop`, which is nan if the file has no other episode.
    """
    rows = len(clock)
    if not len(times):
        raise NoMatch(f"the video has no frames, but the episode has {rows} rows")
    first, end = own_frames(times, start, stop, fps)
    by_time, distance = nearest(times, start + clock.astype(np.float64))
    if frame_by == "index" and end - first < rows:
        raise NoMatch(
            f"the video has {end - first} frames for {rows} rows, so dataset.frame_by=index can't be used"
        )
    if frame_by == "index" or (frame_by == "auto" and end - first == rows):
        numbers = np.arange(first, first + rows)
        off = np.abs(times[numbers] - start - clock)
        return FrameMatch(numbers, 0.0 if (numbers == by_time).all() else float(off.max()))
    lost = ~(distance <= tolerance)  # also true for timestamps that are nan
    if not np.isnan(stop):  # and frames of another episode do not count
        _, after = own_frames(times, start, max(stop, start + rows / fps), fps)
        lost |= (by_time < first) | (by_time >= after)
    if lost.any():
        row = int(np.argmax(lost))
        counts = f"the video has {end - first} frames for {rows} rows"
        if end - first == rows:
            counts = "the video has one frame per row, so dataset.frame_by=index or auto can be used"
        raise NoMatch(
            f"{lost.sum()} of {rows} rows have no frame at their time (first row {row}, {distance[row]:.3f} s off), "
            f"and {counts}"
        )
    if end - first == rows and _drifts(clock, fps) and (by_time != np.arange(first, end)).any():
        raise NoMatch(
            f"the timestamps drift more than half a frame from {fps:g} fps, and the video has a frame for each of the "
            f"{rows} rows, so dataset.frame_by=time would give rows the frames of others: use dataset.frame_by=auto"
        )
    return FrameMatch(by_time, 0.0)


def _drifts(clock: np.ndarray, fps: float) -> bool:
    """Whether timestamps increase, but at some place are more than half a frame from the rate."""
    steps = np.diff(clock.astype(np.float64))
    if not len(steps) or not np.isfinite(clock).all() or (steps <= 0).any():
        return False
    return bool(np.abs(clock - clock[0] - np.arange(len(clock)) / fps).max() > 0.5 / fps)


def nearest(times: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The frame nearest to each target time, and how far away it is in seconds."""
    after = np.searchsorted(times, targets).clip(1, max(len(times) - 1, 1))
    before = after - 1
    after = np.minimum(after, len(times) - 1)
    # <=: the earlier of two equally near frames, as an argmin over all of them would pick.
    frame = np.where(targets - times[before] <= times[after] - targets, before, after)
    return frame, np.abs(times[frame] - targets)
