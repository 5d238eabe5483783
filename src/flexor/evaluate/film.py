"""Writes a video of an episode."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from flexor.core.errors import FlexorError
from flexor.core.output_paths import make_parents, replacing


def write_video(path: str | Path, frames: Sequence[np.ndarray], fps: float) -> None:
    """Write uint8 [height, width, 3] images as an H.264 MP4 that any browser plays."""
    path = Path(path)
    if not frames:
        raise FlexorError(f"can't write {path}: there are no frames; record at least one")
    with replacing(make_parents(path)) as aside:
        _encode(aside, [_even(frame) for frame in frames], fps)


def _even(frame: np.ndarray) -> np.ndarray:
    """yuv420p needs even sides, because it halves the colour planes: repeat the last row or column if odd."""
    height, width = frame.shape[:2]
    return np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def _encode(path: Path, frames: list[np.ndarray], fps: float) -> None:
    # "faststart" puts the index first, so that a web page can play it before it has the whole file.
    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "18", "preset": "veryfast"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
