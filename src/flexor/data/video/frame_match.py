"""Which frame of a video belongs to which row of an episode.

By time: the frame nearest to the row's timestamp. By index: frame i is row i, whatever the timestamps say. Robots
often write the wall clock into `timestamp`, while the video has exactly one frame per row at a steady rate. So
unless told otherwise, the index decides where a video has as many frames as the episode has rows.
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
    """How far the timestamps lead astray; 0 where they lead to the same frames."""


class NoMatch(ValueError):
    """Rows without a frame; the text says how many and why."""


def own_frames(times: np.ndarray, start: float, stop: float, fps: float) -> tuple[int, int]:
    """(first, end) of an episode's frames among `times` [F], ascending. `stop` is nan if the file is its alone."""
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

    `times` [F] of the file's frames and `clock` [n] of the rows are in seconds; the episode's clock is zero at
    `start` in the file, and its frames end at `stop`, nan if the file is its alone.
    """
    rows = len(clock)
    if not len(times):
        raise NoMatch(f"it has no frames, and there are {rows} rows")
    first, end = own_frames(times, start, stop, fps)
    by_time, distance = nearest(times, start + clock.astype(np.float64))
    if frame_by == "index" and end - first < rows:
        raise NoMatch(f"it has {end - first} frames for {rows} rows, so that frame_by=index can't be used")
    if frame_by == "index" or (frame_by == "auto" and end - first == rows):
        numbers = np.arange(first, first + rows)
        off = np.abs(times[numbers] - start - clock)
        return FrameMatch(numbers, 0.0 if (numbers == by_time).all() else float(off.max()))
    lost = ~(distance <= tolerance)  # a clock that is no number leads nowhere
    if not np.isnan(stop):  # nor may it lead to another episode's frames
        _, after = own_frames(times, start, max(stop, start + rows / fps), fps)
        lost |= (by_time < first) | (by_time >= after)
    if lost.any():
        row = int(np.argmax(lost))
        raise NoMatch(
            f"{lost.sum()} of {rows} rows have no frame at their time (first row {row}, {distance[row]:.3f} s off), "
            f"and it has {end - first} frames, not {rows}"
        )
    return FrameMatch(by_time, 0.0)


def nearest(times: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The frame nearest to each wanted time, and how far away it is in seconds."""
    after = np.searchsorted(times, wanted).clip(1, max(len(times) - 1, 1))
    before = after - 1
    after = np.minimum(after, len(times) - 1)
    # <=: the earlier of two equally near frames, as an argmin over all of them would pick.
    frame = np.where(wanted - times[before] <= times[after] - wanted, before, after)
    return frame, np.abs(times[frame] - wanted)
