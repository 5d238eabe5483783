"""Converts colours with swscale through PyAV, with the same result as LeRobot's default reader, torchcodec.

torchcodec uses swscale with the colour matrix in the file's tag (untagged: BT.601), and bicubic chroma where
swscale does not simply repeat it (odd sizes, 10 bit). PyAV's own `to_ndarray("rgb24")` differs there, and in
three more special cases: see `rgb_frame`, `full_range_of` and `_columns_more`.

Scalers and their input frames are reused per thread: creating one costs more than using it. The next call in
the same thread overwrites a reused frame, so callers never get one to keep.
"""

import platform
import threading
from typing import Any

import av
import numpy as np
from av.video.reformatter import ColorRange, Interpolation, VideoReformatter

__all__ = [
    "MATRICES",
    "full_range_of",
    "matrix_of",
    "per_thread",
    "reformat",
    "reusable_frame",
    "rgb_frame",
    "rows",
]

MATRICES = {"bt601": 5, "bt709": 1, "fcc": 4, "smpte240m": 7, "bt2020": 9}  # swscale's numbers
TAGS = {1: "bt709", 4: "fcc", 7: "smpte240m", 9: "bt2020", 10: "bt2020"}  # AVColorSpace; all others: bt601
FULL_RANGE_NAMES = {"yuv420p": "yuvj420p", "yuv422p": "yuvj422p", "yuv444p": "yuvj444p"}
FULL_CHROMA = 0x2000 | 0x4000  # SWS_FULL_CHR_H_INT and _INP: RGB keeps full horizontal colour resolution
# swscale's own threads would compete with ours; earlier versions of PyAV never start any.
ONE_THREAD = {"threads": 1} if "threads" in (VideoReformatter.reformat.__doc__ or "") else {}


def matrix_of(frame: av.VideoFrame) -> str:
    return TAGS.get(frame.colorspace, "bt601")


def full_range_of(frame: av.VideoFrame) -> bool:
    """Whether torchcodec interprets luma as 0..255 instead of 16..235.

    It reads the tag (AV1 and VP9 have nothing else) only if the width is not a multiple of 32, because it then
    converts with another part of FFmpeg.
    """
    name = frame.format.name
    if not name.startswith("yuv") or name.startswith("yuvj"):
        return True
    return frame.color_range == ColorRange.JPEG and frame.width % 32 != 0


def rgb_frame(frame: av.VideoFrame) -> av.VideoFrame:
    """A decoded frame as rgb24, possibly with a few extra columns.

    A planar YUV frame is copied first, to drop its tag of the chroma sample location: newer versions of swscale
    use that tag, but those that LeRobot uses do not.
    """
    matrix, full_range = matrix_of(frame), full_range_of(frame)
    if frame.format.name.startswith("yuv"):
        copy = reusable_frame(frame.format.name, frame.height, frame.width, full_range)
        for plane, target in zip(frame.planes, copy.planes):
            row = min(abs(plane.line_size), target.line_size)
            rows(target)[:, :row] = rows(plane)[:, :row]
        frame = copy
    return reformat(frame, matrix, full_range, "rgb24")


def reusable_frame(layout: str, height: int, width: int, full_range: bool) -> av.VideoFrame:
    """This thread's reusable frame for conversion to RGB; it may be wider than requested."""
    name = FULL_RANGE_NAMES.get(layout, layout) if full_range else layout
    columns = width + _columns_more(layout, width)
    return per_thread(("frame", name, height, columns), lambda: av.VideoFrame(columns, height, name))


def _columns_more(layout: str, width: int) -> int:
    """On ARM, FFmpeg 8.1 has a new conversion for widths that are multiples of 16. It rounds where all earlier
    versions truncate: 1 to 2 levels brighter than in LeRobot. Any other width gives LeRobot's values.
    """
    arm = platform.machine() in ("aarch64", "arm64")
    return 2 if arm and width % 16 == 0 and layout.endswith(("420p", "422p")) else 0


def reformat(
    frame: av.VideoFrame,
    matrix: str,
    full_range: bool,
    layout: str,
    to_matrix: str = "bt601",
    to_full_range: bool = True,
    size: tuple[int, int] | None = None,
) -> av.VideoFrame:
    """Convert layout, colours or size [height, width]; the arguments describe the frame, its tags are ignored."""
    height, width = size or (frame.height, frame.width)
    # only for chroma, if the size does not change
    flags = int(Interpolation.AREA if size else Interpolation.BICUBIC)
    if layout == "yuvj444p" or (size and layout != "yuv420p"):
        flags |= FULL_CHROMA
    source = (frame.format.name, frame.height, frame.width, matrix, full_range)
    key = ("scaler", *source, layout, height, width, to_matrix, to_full_range)
    return per_thread(key, VideoReformatter).reformat(
        frame,
        width=width,
        height=height,
        format=layout,
        src_colorspace=MATRICES[matrix],
        dst_colorspace=MATRICES[to_matrix],
        src_color_range=_range(full_range),
        dst_color_range=_range(to_full_range),
        interpolation=flags,
        **ONE_THREAD,
    )


def _range(full_range: bool) -> ColorRange:
    return ColorRange.JPEG if full_range else ColorRange.MPEG


def rows(plane: Any) -> np.ndarray:
    """A plane's memory [rows, bytes per row with padding], top row first."""
    size = plane.line_size
    memory = np.frombuffer(plane, np.uint8).reshape(-1, abs(size))
    return memory[::-1] if size < 0 else memory


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.objects: dict[tuple, Any] = {}


_per_thread = _PerThread()


def per_thread(key: tuple, make: Any) -> Any:
    """This thread's object for that key, created at first use."""
    if key not in _per_thread.objects:
        _per_thread.objects[key] = make()
    return _per_thread.objects[key]
