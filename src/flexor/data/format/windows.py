"""Converts delta timestamps to row indices and padding masks, for a whole batch at once."""

from collections.abc import Sequence

import numpy as np

from flexor.core.errors import ConfigError

__all__ = ["deltas_from_timestamps", "window_rows"]


def deltas_from_timestamps(timestamps: Sequence[float], fps: float, tolerance_s: float = 1e-4) -> list[int]:
    """Seconds relative to the current frame -> frames relative to it, as LeRobot rounds them.

    A timestamp that is not a multiple of 1/fps (within `tolerance_s`) would silently select a different
    frame than requested, so it is an error.
    """
    frames = [round(t * fps) for t in timestamps]  # Python's round: half to even, like LeRobot's
    off = [t for t, n in zip(timestamps, frames) if abs(t * fps - n) / fps > tolerance_s]
    if off:
        raise ConfigError(
            f"delta timestamps {off} are not multiples of 1/{fps:g} s (tolerance {tolerance_s:g} s): "
            f"this dataset has {fps:g} frames per second; use n/{fps:g} with an integer n"
        )
    return frames


def window_rows(
    rows: np.ndarray, deltas: Sequence[int] | np.ndarray, start: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The rows each sample's window reads, and which of them are padding.

    `start` and `end` [B] are the bounds of the episode of each row of `rows` [B]. A step outside the
    episode reads its first or last row and is marked as padding. Returns row indices [B, T] and is_pad [B, T].
    """
    unclamped = np.asarray(rows, np.int64)[:, None] + np.asarray(deltas, np.int64)[None, :]
    first = np.asarray(start, np.int64)[:, None]
    last = np.asarray(end, np.int64)[:, None] - 1
    clamped = np.minimum(np.maximum(unclamped, first), last)
    return clamped, clamped != unclamped
