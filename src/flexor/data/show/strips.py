"""Filmstrips: some frames of an episode, of all cameras, as one JPEG."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from flexor.core.errors import DatasetError, SourceError
from flexor.data.dataset import Dataset
from flexor.data.format.depth import depths_of_codes
from flexor.data.show.budget import ThumbnailLayout
from flexor.data.video.planes import to_rgb
from flexor.pages.images import jpeg, scaled

QUANTIZERS = (5, 8, 12, 18, 31)  # tried in this order until the image is small enough
GAIN = 5  # the finest is at most so many times as large as the coarsest
DEPTH_COLOURS = np.array([[253, 231, 37], [94, 201, 98], [33, 145, 140], [59, 82, 139], [68, 1, 84]])
UNREADABLE = np.array([120, 40, 40], np.uint8)


@dataclass
class Strip:
    """The images of an episode."""

    frames: list[int]
    """Its frames of the episode."""
    image: bytes = b""
    """A JPEG: a row per camera, a column per frame. Empty if nothing could be decoded."""
    problems: dict[str, str] = field(default_factory=dict)
    """Cameras with frames that can't be decoded, and why."""
    levels: dict[str, np.ndarray] = field(default_factory=dict)
    """Per camera: how many pixels of its thumbnails have each level, [channels, 256]."""


def make_strip(
    dataset: Dataset, position: int, sheet: ThumbnailLayout, nbytes: int, marked: Collection[int] = ()
) -> Strip:
    """The strip of the episode at this position, of at most `nbytes`. It has the `marked` frames, if they fit."""
    length = int(dataset.episodes.length[position])
    frames = with_marked(spread_frames(length, sheet.most), [frame for frame in marked if frame < length])
    strip = Strip(frames)
    first = int(dataset.episodes.start[position])
    rows = []
    for camera in sheet.widths:
        size = sheet.height, sheet.widths[camera]
        thumbnails, why = camera_thumbnails(dataset, camera, first + np.array(frames), *size)
        if why:
            strip.problems[camera] = why
        rows.append(thumbnails)
        strip.levels[camera] = _levels(thumbnails)
    while rows:
        strip.image = _smallest(_sheet(rows), nbytes)
        if len(strip.image) <= nbytes:
            break
        if len(strip.frames) == 1:
            strip.image = jpeg(_sheet(rows), QUANTIZERS[-1])
            break
        remaining = [i for i, frame in enumerate(strip.frames) if i % 2 == 0 or frame in marked]
        remaining = remaining if len(remaining) < len(strip.frames) else remaining[::2]
        strip.frames = [strip.frames[i] for i in remaining]
        rows = [row[remaining] for row in rows]
    if len(strip.image) > nbytes:
        strip.image = b""
        strip.problems["images"] = "no room for them on the page: show fewer episodes"
    return strip


def spread_frames(length: int, limit: int) -> list[int]:
    """Frames at equal distances, the first and the last among them."""
    return np.unique(np.linspace(0, length - 1, min(length, limit)).round().astype(int)).tolist()


def with_marked(frames: list[int], marked: Sequence[int]) -> list[int]:
    """The frames with each marked one instead of the nearest that is not marked."""
    replaceable = [frame for frame in frames if frame not in marked]
    for frame in marked:
        if frame not in frames and replaceable:
            replaceable.remove(min(replaceable, key=lambda near: abs(near - frame)))
    return sorted({*replaceable, *marked})[: len(frames)]


def camera_thumbnails(
    dataset: Dataset, camera: str, rows: np.ndarray, height: int, width: int
) -> tuple[np.ndarray, str | None]:
    """Thumbnails [n, height, width, 3] of rows, and why some can't be decoded, which are left in one colour."""
    out = np.empty((len(rows), height, width, 3), np.uint8)
    out[:] = UNREADABLE
    try:
        why = _decode(dataset, camera, dataset.frame_ids(rows), out)
    except SourceError:
        raise
    except DatasetError as error:  # none of the camera's frames can be decoded
        why = {0: str(error)}
    if not why:
        return out, None
    return out, f"{len(why)} of {len(rows)} frames can't be decoded: {next(iter(why.values()))}"


def _decode(dataset: Dataset, camera: str, ids: np.ndarray, out: np.ndarray) -> dict[int, str]:
    store = dataset.store
    format = store.format(camera)
    planes = np.empty(format.nbytes, np.uint8)
    pixels = np.empty((format.height, format.width, format.channels), format.dtype)
    ends = depth_ends(dataset, camera) if format.is_depth else None
    # In a video, code 0 stands for all that is nearer than the scale begins, and for what was not measured.
    nothing = float(depths_of_codes(format.depth)[0]) if format.layout == "gray12" else 0.0

    def keep(i: int) -> None:
        to_rgb(format, planes, pixels)
        rgb = _three_channels(pixels) if ends is None else depth_colours(pixels[..., 0], *ends, nothing)
        out[i] = scaled(rgb, *out.shape[1:3])

    return store.decode(camera, ids, lambda _: planes, keep)


def _three_channels(pixels: np.ndarray) -> np.ndarray:
    return np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels[:, :, :3]


def depth_ends(dataset: Dataset, camera: str) -> tuple[float, float]:
    """The depths between which colours change: those of almost all pixels, in the unit that is read."""
    stats = dataset.stats.get(camera, {})
    for near, far in (("q01", "q99"), ("min", "max")):
        if near in stats and far in stats:
            low, high = float(np.min(stats[near])), float(np.max(stats[far]))
            if np.isfinite(high - low) and high > low:
                return max(low, 0.0), high
    scale = dataset.features[camera].depth
    assert scale is not None
    metre = 1000.0 if dataset.store.depth_unit == "mm" else 1.0
    return scale.low * metre, scale.high * metre


def depth_colours(depths: np.ndarray, near: float, far: float, nothing: float = 0.0) -> np.ndarray:
    """Depths [H, W] as colours [H, W, 3]: near is warm, far is violet; black where a depth is at most `nothing`."""
    place = np.nan_to_num((depths - near) / (far - near), nan=0.0, posinf=1.0, neginf=0.0).clip(0, 1)
    stops = np.linspace(0, 1, len(DEPTH_COLOURS))
    colours = np.stack([np.interp(place, stops, DEPTH_COLOURS[:, c]) for c in range(3)], axis=-1)
    measured = np.isfinite(depths) & (depths > nothing)
    return np.where(measured[..., None], colours, 0).astype(np.uint8)


def _sheet(rows: list[np.ndarray]) -> np.ndarray:
    """Thumbnails [n, h, w, 3] of each camera -> one image, a row each."""
    wide = max(len(row) * row.shape[2] for row in rows)
    lines = [np.concatenate(list(row), axis=1) for row in rows]
    return np.concatenate([np.pad(line, ((0, 0), (0, wide - line.shape[1]), (0, 0))) for line in lines])


def _smallest(pixels: np.ndarray, nbytes: int) -> bytes:
    """The best JPEG of at most `nbytes`; a larger one if the coarsest is still too large, or would be."""
    data = b""
    for quantizer in QUANTIZERS:
        data = jpeg(pixels, quantizer)
        if len(data) <= nbytes or len(data) > GAIN * nbytes:
            break
    return data


def _levels(thumbnails: np.ndarray) -> np.ndarray:
    return np.stack([np.bincount(thumbnails[..., c].ravel(), minlength=256) for c in range(3)])
