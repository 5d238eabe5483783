"""Images as bytes of a file: JPEG and PNG, encoded by FFmpeg."""

from __future__ import annotations

import base64
from fractions import Fraction
from typing import Any

import av
import numpy as np
from av.video.reformatter import Interpolation


def jpeg(pixels: np.ndarray, quantizer: int = 5) -> bytes:
    """RGB uint8 [H, W, 3] as a JPEG. `quantizer` from 2 (about quality 95) to 31 (smallest)."""
    return _encoded(pixels, "mjpeg", "yuvj420p", quantizer)


def png(pixels: np.ndarray) -> bytes:
    """RGB uint8 [H, W, 3] as a PNG."""
    return _encoded(pixels, "png", "rgb24")


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def scaled(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """RGB uint8 [H, W, 3] at another size: averaged where it becomes smaller, interpolated where it becomes larger."""
    if pixels.shape[:2] == (height, width):
        return pixels
    way = Interpolation.AREA if height <= pixels.shape[0] else Interpolation.BILINEAR
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
    return frame.reformat(width=width, height=height, interpolation=way).to_ndarray()


def _encoded(pixels: np.ndarray, codec: str, layout: str, quantizer: int | None = None) -> bytes:
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24").reformat(format=layout)
    encoder: Any = av.CodecContext.create(codec, "w")
    encoder.height, encoder.width, encoder.pix_fmt = frame.height, frame.width, layout
    encoder.time_base = Fraction(1, 1)
    encoder.thread_count = 1
    if quantizer is not None:
        encoder.qmin = encoder.qmax = quantizer
    frame.pts = 0
    return b"".join(bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)])
