"""Cameras that show nothing: images of a single colour, or the same image while the robot moves.

`flexor data check` looks at every frame that it decodes; without decoding, and at the start of a run, at a few of each
episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import av
import numpy as np

from flexor.core.batch import ACTION, STATE

BLANK = 8  # of 255: an image is blank if no channel has a larger range; compression leaves a little
MIN_BLANK = 2  # blank images that make an episode one without a camera; a single one may be a start-up
PIXELS = 96  # rows or columns of an image that are looked at, at least
CHANGED, CHANGED_SHARE = 12, 0.0015  # images differ if this share of pixels changes by more levels
STILL_S, STILL_FRAMES = 2.0, 10  # a camera may pause for so long; an episode may be shorter
FEWEST_FRAMES = 4
MOVED, MOVED_SHARE = 0.1, 0.6  # the robot moves if this share of joints moves by so much of their range
SAMPLES = 5  # frames of an episode, where not all are decoded
CHEAP = 8  # frames that are decoded for one of these


@dataclass(frozen=True)
class ImageFault:
    """What is wrong with the images of an episode, from a frame on."""

    name: str
    first: int
    last: int
    evidence: str


@dataclass
class ImageWatch:
    """Looks at the images of a camera in the order in which they were taken."""

    keys: list[int] = field(default_factory=list)
    blank: list[bool] = field(default_factory=list)
    since: list[int] = field(default_factory=list)
    """For each image, the key of the earliest one that looks the same, and everything in between too."""
    levels: dict[int, np.ndarray] = field(default_factory=dict)
    """Of some images, by key: number, sum and sum of squares of the pixels of each colour, from 0 to 1. [3, 3]"""
    _reference: np.ndarray | None = None

    def add(self, key: int, frame: av.VideoFrame, colours: bool = False) -> None:
        step = max(1, min(frame.height, frame.width) // PIXELS)
        light = _light(frame, step)
        is_blank = int(light.max()) - int(light.min()) <= BLANK and _is_blank(frame, step)
        if not self.keys or not self._looks_the_same(light):
            self._reference = light.astype(np.int16)
            self.since.append(key)
        else:
            self.since.append(self.since[-1])
        self.keys.append(key)
        self.blank.append(is_blank)
        if colours:
            pixels = frame.to_ndarray(format="rgb24")[::step, ::step].reshape(-1, 3) / 255
            self.levels[key] = np.array([[len(pixels)] * 3, pixels.sum(0), (pixels**2).sum(0)])

    def _looks_the_same(self, light: np.ndarray) -> bool:
        reference = self._reference
        if reference is None or reference.shape != light.shape:
            return False
        return float((np.abs(light - reference) > CHANGED).mean()) <= CHANGED_SHARE


@dataclass(frozen=True, eq=False)
class Motion:
    """What the robot does in an episode."""

    rows: np.ndarray  # [T, D]
    span: np.ndarray  # [D] ranges in all episodes

    def moves(self, first: int, last: int) -> bool:
        """Whether most joints move between two frames."""
        part, used = self.rows[first : last + 1], self.span > 0
        if not used.any() or not len(part):
            return False
        moved = (np.fmax.reduce(part) - np.fmin.reduce(part))[used] > MOVED * self.span[used]
        return bool(moved.mean() >= MOVED_SHARE)


def motions(columns: Mapping[str, Mapping[int, np.ndarray]]) -> dict[int, Motion]:
    """By episode. `columns` [T, D] by feature and episode; the state says it better than the action."""
    parts = columns.get(STATE) or columns.get(ACTION)
    if not parts:
        return {}
    low = np.fmin.reduce([np.fmin.reduce(part) for part in parts.values()]).astype(np.float64)
    high = np.fmax.reduce([np.fmax.reduce(part) for part in parts.values()]).astype(np.float64)
    tiny = 1e-6 * np.maximum(1e-3, np.maximum(np.abs(low), np.abs(high)))
    with np.errstate(invalid="ignore"):
        span = np.where(np.isfinite(high - low) & (high - low > tiny), high - low, 0.0)
    return {episode: Motion(part, span) for episode, part in parts.items()}


def image_faults(
    frames: Sequence[int],
    blank: np.ndarray,
    since: np.ndarray,
    length: int,
    fps: float,
    motion: Motion | None,
) -> list[ImageFault]:
    """Faults in an episode, of which the images of some or all `frames` were looked at; `since` by any numbers."""
    faults = []
    count = int(blank.sum())
    if count and count >= min(MIN_BLANK, length):
        first, last = (int(frames[i]) for i in (np.flatnonzero(blank)[0], np.flatnonzero(blank)[-1]))
        part = f"{count} of {len(frames)} frames" + (" that were looked at" if len(frames) < length else "")
        faults.append(ImageFault("blank camera", first, last, f"it is blank (one colour) in {part}"))
    shortest = min(max(STILL_FRAMES, round(STILL_S * fps)), length - 1)
    edges = np.flatnonzero(np.append(True, (since[1:] != since[:-1]) | (blank[1:] != blank[:-1]))).tolist()
    runs = [(a, b - 1) for a, b in zip(edges, [*edges[1:], len(frames)]) if not blank[a]]
    runs = [
        (a, b) for a, b in runs if b - a + 1 >= FEWEST_FRAMES and frames[b] - frames[a] >= shortest - CHEAP
    ]
    runs = [(a, b) for a, b in runs if motion is not None and motion.moves(int(frames[a]), int(frames[b]))]
    if runs:
        first, last = max(
            ((int(frames[a]), int(frames[b])) for a, b in runs), key=lambda run: run[1] - run[0]
        )
        evidence = f"it shows the same image from frame {first} to frame {last}, while the robot moves"
        faults.append(ImageFault("frozen camera", first, last, evidence))
    return faults


def spread(count: int, limit: int) -> np.ndarray:
    """Numbers below `count`, at equal distances, the first and the last included; at most `limit`."""
    if not count:
        return np.empty(0, np.int64)
    return np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(int))


def cheap_samples(cost: np.ndarray) -> np.ndarray:
    """Some frames of an episode, spread over it, for which few others are decoded. `cost` [T] says how many."""
    places = spread(len(cost), SAMPLES)
    cheap = np.flatnonzero(cost <= CHEAP)
    if not len(cheap):
        return cheap
    return np.unique([cheap[np.argmin(np.abs(cheap - place))] for place in places])


def _light(frame: av.VideoFrame, step: int) -> np.ndarray:
    """Some pixels of the frame in one channel, uint8."""
    name, plane = frame.format.name, frame.planes[0]
    if name.startswith(("yuv", "gray", "nv12")) and frame.format.components[0].bits == 8:
        rows = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)  # type: ignore[call-overload]
        return rows[: frame.height : step, : frame.width : step]
    return frame.to_ndarray(format="gray")[::step, ::step]


def _is_blank(frame: av.VideoFrame, step: int) -> bool:
    pixels = frame.to_ndarray(format="rgb24")[::step, ::step].reshape(-1, 3)
    return int((pixels.max(0).astype(int) - pixels.min(0)).max()) <= BLANK
