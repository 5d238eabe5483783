"""Depth maps as frames: 12-bit codes of a video, or an image's own 16-bit or floating-point values."""

from __future__ import annotations

import av
import numpy as np
from av.video.reformatter import VideoReformatter

from flexor.data.format.depth import CODES, DepthScale, depths_of_codes, in_output_unit
from flexor.data.video.open_file import decode_one
from flexor.data.video.tiff import float_tiff

PIXELS: dict[str, np.dtype] = {
    "gray12": np.dtype("<u2"),
    "gray16": np.dtype("<u2"),
    "grayf32": np.dtype("<f4"),
}
"""Type of a pixel in memory, by layout."""


def depth_layout(frame: av.VideoFrame, coded: bool) -> str:
    """The layout for a decoded depth map; `coded`: it is a frame of a video, which has codes."""
    if coded:
        return "gray12"
    return "grayf32" if frame.format.name.startswith("grayf32") else "gray16"


def pack_depth(frame: av.VideoFrame, layout: str, size: tuple[int, int], out: np.ndarray) -> None:
    """Write a decoded depth map into `out`, uint8 [nbytes]. Scaling takes the nearest pixel: averages of two surfaces
    would be depths where nothing is."""
    name = f"{layout}le"
    if frame.format.name != name:
        frame = VideoReformatter().reformat(frame, format=name)
    pixels = frame.to_ndarray().astype(PIXELS[layout], copy=False)  # [H, W]
    if pixels.shape != size:
        nearest = [(np.arange(n) * have + have // 2) // n for n, have in zip(size, pixels.shape)]
        pixels = pixels[np.ix_(*nearest)]
    out[:] = np.ascontiguousarray(pixels).view(np.uint8).ravel()


def depth_values(layout: str, scale: DepthScale, planes: np.ndarray) -> np.ndarray:
    """Planes uint8 [nbytes] -> depths float32 [pixels]."""
    pixels = planes.view(PIXELS[layout])
    if layout == "gray12":
        return depths_of_codes(scale)[pixels & (CODES - 1)]
    return in_output_unit(pixels, scale)


def decode_depth_image(data: bytes) -> av.VideoFrame:
    """The bytes of a TIFF or PNG -> a frame in gray16le or grayf32le."""
    name = "png" if data[:4] == b"\x89PNG" else "tiff" if data[:4] in (b"II*\0", b"MM\0*") else None
    if name is None:
        raise ValueError(f"it starts with {data[:4]!r}, and depth maps are TIFF or PNG")
    if name == "tiff" and (depths := float_tiff(data)) is not None:
        return av.VideoFrame.from_ndarray(depths, format="grayf32le")
    frame = decode_one(name, data)
    layout = frame.format.name
    if not layout.startswith(("gray16", "grayf32")):
        raise ValueError(f"its pixels are {layout}, but depth maps have 16 bits or floating point")
    target = "grayf32le" if layout.startswith("grayf32") else "gray16le"
    return frame if layout == target else VideoReformatter().reformat(frame, format=target)
