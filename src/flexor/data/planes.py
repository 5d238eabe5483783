"""Frames as the decoder puts them out: one flat run of bytes each, and RGB made of them at the very end.

Most cameras come as YUV 4:2:0, half the bytes of RGB, so that is how frames are kept and moved. Whatever
else a decoder gives (10 bit, 4:4:4, odd sizes, palettes) is rare, costs as much or nearly as much as RGB,
and swscale treats each in its own way: it becomes RGB at once.

Colours are those of LeRobot's default reader, torchcodec: swscale with the matrix the file is tagged with
(untagged: BT.601). PyAV's own `to_ndarray("rgb24")` agrees except in three corners, see `_rgb`,
`_full_range` and `_columns_more`.
"""

import platform
import threading
from dataclasses import dataclass, replace
from typing import Any

import av
import numpy as np
from av.video.reformatter import ColorRange, Interpolation, VideoReformatter

__all__ = ["PlaneFormat", "format_of", "pack", "resized", "to_rgb"]

# AVColorSpace as a frame carries it; everything else, untagged above all, is BT.601 to swscale.
MATRICES = {1: "bt709", 4: "fcc", 7: "smpte240m", 9: "bt2020", 10: "bt2020"}
SWSCALE_MATRICES = {"bt601": 5, "bt709": 1, "fcc": 4, "smpte240m": 7, "bt2020": 9}
YUV420 = ("yuv420p", "yuvj420p")
FULL_CHROMA = 0x2000 | 0x4000  # SWS_FULL_CHR_H_INT and _INP: RGB is scaled without halving its colours
# swscale's own threads would fight ours; PyAV before 17 never starts any.
ONE_THREAD = {"threads": 1} if "threads" in (VideoReformatter.reformat.__doc__ or "") else {}
CHANNELS = {"yuv420p": 3, "rgb24": 3, "rgba": 4, "gray": 1}


@dataclass(frozen=True)
class PlaneFormat:
    """How a camera's frames lie in memory: one flat run of bytes per frame, plane after plane, no padding."""

    height: int
    width: int
    layout: str
    """yuv420p (sides even), or rgb24; rgba and gray only for pictures that are no video."""

    matrix: str = "bt601"
    """Coefficients of yuv420p: bt601, bt709, fcc, smpte240m or bt2020."""

    full_range: bool = True
    """Luma 0..255 instead of 16..235."""

    def __post_init__(self) -> None:
        assert self.layout in CHANNELS and self.matrix in SWSCALE_MATRICES
        assert self.layout != "yuv420p" or not (self.height % 2 or self.width % 2)

    @property
    def channels(self) -> int:
        """Of the picture that comes out."""
        return CHANNELS[self.layout]

    @property
    def nbytes(self) -> int:
        pixels = self.height * self.width
        return pixels * 3 // 2 if self.layout == "yuv420p" else pixels * self.channels

    @property
    def planes(self) -> tuple[tuple[int, int, int], ...]:
        """(first byte, rows, bytes per row) of every plane."""
        height, width = self.height, self.width
        if self.layout != "yuv420p":
            return ((0, height, width * self.channels),)
        luma, chroma = height * width, height * width // 4
        half = (height // 2, width // 2)
        return (0, height, width), (luma, *half), (luma + chroma, *half)

    def split(self, planes: np.ndarray) -> list[np.ndarray]:
        """Views [rows, bytes per row] of the planes in a frame's bytes [nbytes]."""
        return [planes[first : first + rows * row].reshape(rows, row) for first, rows, row in self.planes]


def format_of(frame: av.VideoFrame) -> PlaneFormat:
    """The format in which frames like this one are kept."""
    height, width = frame.height, frame.width
    if frame.format.name in YUV420 and not (height % 2 or width % 2):
        return PlaneFormat(height, width, "yuv420p", _matrix(frame), _full_range(frame))
    return PlaneFormat(height, width, "rgb24")


def resized(format: PlaneFormat, height: int, width: int) -> PlaneFormat:
    """The format of the same camera at another size."""
    if format.layout == "yuv420p" and (height % 2 or width % 2):
        return PlaneFormat(height, width, "rgb24")
    return replace(format, height=height, width=width)


def pack(frame: av.VideoFrame, format: PlaneFormat, out: np.ndarray) -> None:
    """Write a decoded frame into `out`, uint8 [nbytes].

    A frame of this very format is copied; any other is converted, and scaled by averaging areas.
    """
    own = format_of(frame)
    if own == format and (own.layout == "yuv420p" or frame.format.name == "rgb24"):
        packed = frame
    elif format == PlaneFormat(own.height, own.width, "rgb24"):
        packed = _rgb(frame)
    else:
        packed = _scaled(frame, format)
    for plane, part in zip(packed.planes, format.split(out)):
        part[:] = _rows(plane)[:, : part.shape[1]]


def to_rgb(format: PlaneFormat, planes: np.ndarray, out: np.ndarray) -> None:
    """Planes uint8 [nbytes] -> the picture in `out`, uint8 [H, W, C]; swscale works without the GIL."""
    if format.layout != "yuv420p":
        out[:] = planes.reshape(out.shape)
        return
    frame = _kept_frame("yuv420p", format.width, format.height)
    for plane, part in zip(frame.planes, format.split(planes)):
        _rows(plane)[:, : part.shape[1]] = part
    rgb = _reformat(frame, format.matrix, format.full_range, format="rgb24")
    out.reshape(format.height, -1)[:] = _rows(rgb.planes[0])[:, : format.width * 3]


def _rgb(frame: av.VideoFrame) -> av.VideoFrame:
    """The frame as rgb24, perhaps with a few columns too many.

    A planar YUV frame is copied first, which leaves behind its tag of where the chroma samples lie: newer
    swscale honours that tag, and those that LeRobot runs on do not.
    """
    source = frame
    if frame.format.name.startswith("yuv"):
        source = _kept_frame(frame.format.name, frame.width, frame.height)
        for plane, kept in zip(frame.planes, source.planes):
            row = min(abs(plane.line_size), kept.line_size)
            _rows(kept)[:, :row] = _rows(plane)[:, :row]
    return _reformat(source, _matrix(frame), _full_range(frame), format="rgb24")


def _scaled(frame: av.VideoFrame, format: PlaneFormat) -> av.VideoFrame:
    interpolation = int(Interpolation.AREA)
    if format.layout != "yuv420p":
        interpolation |= FULL_CHROMA
    return _reformat(
        frame,
        _matrix(frame),
        _full_range(frame),
        format=format.layout,
        width=format.width,
        height=format.height,
        dst_colorspace=SWSCALE_MATRICES[format.matrix],
        dst_color_range=_swscale_range(format.full_range),
        interpolation=interpolation,
    )


def _reformat(frame: av.VideoFrame, matrix: str, full_range: bool, **target: Any) -> av.VideoFrame:
    """Through this thread's scaler for this kind of frame: setting one up costs more than using it."""
    key = ("scaler", frame.format.name, frame.width, frame.height, matrix, full_range, *target.values())
    if key not in _kept.objects:
        _kept.objects[key] = VideoReformatter()
    same = {
        "dst_colorspace": SWSCALE_MATRICES["bt601"],  # of no meaning for RGB
        "dst_color_range": _swscale_range(full_range),
    }
    return _kept.objects[key].reformat(
        frame,
        src_colorspace=SWSCALE_MATRICES[matrix],
        src_color_range=_swscale_range(full_range),
        **(same | target | ONE_THREAD),
    )


def _kept_frame(layout: str, width: int, height: int) -> av.VideoFrame:
    """This thread's frame to fill and convert, with `_columns_more` than asked for."""
    key = ("frame", layout, width, height)
    if key not in _kept.objects:
        _kept.objects[key] = av.VideoFrame(width + _columns_more(layout, width), height, layout)
    return _kept.objects[key]


def _columns_more(layout: str, width: int) -> int:
    """On ARM, FFmpeg 8.1 got a conversion for widths that are multiples of 16 which rounds where all earlier
    ones truncate: 1 to 2 levels brighter than what LeRobot sees. Another width gives LeRobot's numbers.
    """
    affected = platform.machine() in ("aarch64", "arm64") and layout in (*YUV420, "yuv422p", "yuvj422p")
    return 2 if affected and width % 16 == 0 else 0


def _matrix(frame: av.VideoFrame) -> str:
    return MATRICES.get(frame.colorspace, "bt601")


def _full_range(frame: av.VideoFrame) -> bool:
    """Whether torchcodec takes luma for 0..255.

    It looks at the tag (AV1 and VP9 have nothing else) only where the width is no multiple of 32, because it
    converts through another part of FFmpeg there.
    """
    name = frame.format.name
    if not name.startswith("yuv") or name.startswith("yuvj"):
        return True
    return frame.color_range == ColorRange.JPEG and frame.width % 32 != 0


def _swscale_range(full_range: bool) -> ColorRange:
    return ColorRange.JPEG if full_range else ColorRange.MPEG


def _rows(plane: Any) -> np.ndarray:
    """A plane's memory [rows, bytes per row, padding included], top row first."""
    rows = np.frombuffer(plane, np.uint8).reshape(plane.height, abs(plane.line_size))
    return rows[::-1] if plane.line_size < 0 else rows


class _Kept(threading.local):
    """Scalers and frames of one thread; there are as many as kinds of frames."""

    def __init__(self) -> None:
        self.objects: dict[tuple, Any] = {}


_kept = _Kept()
