"""How large the parts of a page may be, so that the whole stays below its limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

PAGE_BYTES = 20_000_000
TEXT_BYTES = 1_000_000  # for styles, scripts, statistics and problems
EPISODE_BYTES = 8_000  # an episode with less could not be recognised: fewer episodes are shown instead
EPISODE_TEXT = 600  # its numbers, tasks, and what JSON adds
CURVES_SHARE = 0.25  # of what an episode gets; the rest is for its images
HEIGHTS = (144, 120, 96, 72, 56, 40)  # of a thumbnail
MIN_FRAMES = 12  # a strip with fewer has smaller thumbnails, if that makes room for more
MAX_FRAMES = 48
MAX_POINTS = 1000  # per curve: more than a screen shows
MAX_WIDTH = 16_000  # pixels; browsers may refuse wider images
BYTES_PER_PIXEL = 0.16  # of a JPEG of ordinary camera images


@dataclass(frozen=True)
class PageBudget:
    """What each episode of a page gets."""

    episodes: list[int]
    """Positions of the episodes that are shown, ascending."""
    curve_bytes: int
    """Bytes of all curves of an episode, before base64."""
    image_bytes: int
    """Bytes of all images of an episode, before base64."""

    def points(self, curves: int) -> int:
        """Values per curve."""
        return int(np.clip(self.curve_bytes // (2 * max(curves, 1)), 8, MAX_POINTS))


def page_budget(lengths: Sequence[int], limit: int = PAGE_BYTES) -> PageBudget:
    """The shares of the episodes with these lengths. If there are too many, an even selection is shown."""
    room = max(limit - TEXT_BYTES, EPISODE_BYTES)
    count = min(len(lengths), max(room // EPISODE_BYTES, 1))
    positions = np.unique(np.linspace(0, len(lengths) - 1, count).round().astype(int)).tolist()
    episode_bytes = (room // len(positions) - EPISODE_TEXT) * 3 // 4  # base64 takes four bytes for three
    curves = min(int(episode_bytes * CURVES_SHARE), 2 * 64 * MAX_POINTS)
    return PageBudget(positions, curves, episode_bytes - curves)


@dataclass(frozen=True)
class ThumbnailLayout:
    """The layout of an episode's images: one row of thumbnails per camera, all rows of the same height."""

    height: int
    widths: dict[str, int]
    """Width of a thumbnail, by camera."""
    most: int
    """Thumbnails in a row."""


def thumbnail_layout(sizes: Mapping[str, tuple[int, int]], nbytes: int) -> ThumbnailLayout:
    """The largest thumbnails of which enough fit into `nbytes`. `sizes` are (height, width) by camera."""
    for height in HEIGHTS:
        widths = {name: thumbnail_width(*size, height) for name, size in sizes.items()}
        frames = int(nbytes / BYTES_PER_PIXEL / (height * sum(widths.values())))
        if frames >= MIN_FRAMES or height == HEIGHTS[-1]:
            break
    columns = min(frames, MAX_FRAMES, MAX_WIDTH // max(widths.values()))
    return ThumbnailLayout(height, widths, max(columns, 1))


def thumbnail_width(height: int, width: int, to_height: int) -> int:
    """Keeps the shape of the image, but no shape is extreme; whole JPEG blocks, so that neighbours do not mix."""
    wide = float(np.clip(width / max(height, 1), 0.25, 4)) * to_height
    return max(round(wide / 8) * 8, 8)
