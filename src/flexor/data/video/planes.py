"""Frames as the decoder outputs them, one flat byte array each; they are converted to RGB at the very end.

Most videos are YUV 4:2:0, which takes half the bytes of RGB, so frames are cached and moved in that format.
Other formats (10 bit, 4:4:4, odd sizes, palettes) are rare, take about as many bytes as RGB, and swscale
handles each differently: they are converted to RGB immediately.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import count
from typing import Any, Literal

import av
import numpy as np

from flexor.core.errors import DatasetError, FlexorError
from flexor.data.format.depth import DepthScale
from flexor.data.video import colour
from flexor.data.video.depth_planes import PIXELS as DEPTH_PIXELS
from flexor.data.video.depth_planes import depth_layout, depth_values, pack_depth

__all__ = [
    "JPEG_QUALITY",
    "PlaneFormat",
    "decode_jpeg",
    "depth_format",
    "encode_jpeg",
    "format_of",
    "pack",
    "resized",
    "to_rgb",
]

CHANNELS = {"yuv420p": 3, "rgb24": 3, "rgba": 4, "gray": 1} | dict.fromkeys(DEPTH_PIXELS, 1)
USUAL_DEPTH = DepthScale()
JPEG_QUALITY = 2  # mjpeg's quantiser: 1 is the best, 2 is about JPEG quality 95


@dataclass(frozen=True)
class PlaneFormat:
    """The memory layout of a camera's frames: one flat byte array per frame, plane after plane, no padding."""

    height: int
    width: int
    layout: str
    """yuv420p (sides even), rgb24, rgba or gray; of depth maps gray12, gray16 or grayf32."""

    matrix: str = "bt601"
    """Coefficients of yuv420p: bt601, bt709, fcc, smpte240m or bt2020."""

    full_range: bool = True
    """Luma 0..255 instead of 16..235."""

    depth: DepthScale = USUAL_DEPTH
    """What the values of a depth map mean."""

    def __post_init__(self) -> None:
        assert self.layout in CHANNELS and self.matrix in colour.MATRICES
        assert self.layout != "yuv420p" or not (self.height % 2 or self.width % 2)

    def __hash__(self) -> int:  # of every frame that is packed
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.height, self.width, self.layout, self.matrix, self.full_range, self.depth))

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash: that of a text differs from process to process."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @property
    def channels(self) -> int:
        """Channels of the converted image."""
        return CHANNELS[self.layout]

    @property
    def is_depth(self) -> bool:
        return self.layout in DEPTH_PIXELS

    @property
    def dtype(self) -> np.dtype:
        """Type of the converted image: levels, or depths."""
        return np.dtype(np.float32 if self.is_depth else np.uint8)

    @property
    def nbytes(self) -> int:
        pixels = self.height * self.width
        if self.is_depth:
            return pixels * DEPTH_PIXELS[self.layout].itemsize
        return pixels * 3 // 2 if self.layout == "yuv420p" else pixels * self.channels

    @property
    def picture_bytes(self) -> int:
        """Of the converted image."""
        return self.height * self.width * self.channels

    @cached_property
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
    """The format in which frames like this one are stored."""
    tags = colour.matrix_of(frame), colour.full_range_of(frame)
    return _format(frame.height, frame.width, frame.format.name, *tags)


def depth_format(frame: av.VideoFrame, scale: DepthScale, coded: bool) -> PlaneFormat:
    """The format in which depth maps like this one are stored; `coded`: frames of a video."""
    return PlaneFormat(frame.height, frame.width, depth_layout(frame, coded), depth=scale)


@lru_cache  # called for every frame
def _format(height: int, width: int, name: str, matrix: str, full_range: bool) -> PlaneFormat:
    if name in ("yuv420p", "yuvj420p") and not (height % 2 or width % 2):
        return PlaneFormat(height, width, "yuv420p", matrix, full_range)
    return PlaneFormat(height, width, name if name in ("gray", "rgba") else "rgb24")


def resized(format: PlaneFormat, height: int, width: int) -> PlaneFormat:
    """The format of the same camera at another size."""
    if format.layout == "yuv420p" and (height % 2 or width % 2):
        return PlaneFormat(height, width, "rgb24")
    return replace(format, height=height, width=width)


def pack(frame: av.VideoFrame, format: PlaneFormat, out: np.ndarray) -> None:
    """Write a decoded frame into `out`, uint8 [nbytes].

    A frame of exactly this format is copied; any other is converted, and scaled by area averaging.
    """
    # frames of a video are alike: how to pack them is decided for the first
    like = frame.format.name, frame.height, frame.width, frame.colorspace, frame.color_range
    colour.per_thread(("pack", format, like), lambda: _packer(frame, format))(frame, format, out)


Packer = Callable[[av.VideoFrame, PlaneFormat, np.ndarray], None]


def _packer(frame: av.VideoFrame, format: PlaneFormat) -> Packer:
    """What packs frames like this one."""
    if format.is_depth:
        return _pack_depth
    native = format_of(frame)
    if native == format and (native.layout == "yuv420p" or frame.format.name == native.layout):
        return _fastest_gather(frame, format)
    if format == PlaneFormat(native.height, native.width, "rgb24"):
        return lambda frame, format, out: _gather(colour.rgb_frame(frame), format, out)
    return _pack_converted


def _pack_depth(frame: av.VideoFrame, format: PlaneFormat, out: np.ndarray) -> None:
    pack_depth(frame, format.layout, (format.height, format.width), out)


def _pack_converted(frame: av.VideoFrame, format: PlaneFormat, out: np.ndarray) -> None:
    converted = colour.reformat(
        frame,
        colour.matrix_of(frame),
        colour.full_range_of(frame),
        format.layout,
        format.matrix,
        format.full_range,
        (format.height, format.width),
    )
    _gather(converted, format, out)


def to_rgb(format: PlaneFormat, planes: np.ndarray, out: np.ndarray) -> None:
    """Planes uint8 [nbytes] -> the image in `out`, uint8 [H, W, C]; swscale releases the GIL.

    A depth map becomes float32 [H, W, 1], in the unit that is read.
    """
    if format.is_depth:
        out[:] = depth_values(format.layout, format.depth, planes).reshape(out.shape)
        return
    if format.layout != "yuv420p":
        out[:] = planes.reshape(out.shape)
        return
    frame = colour.reusable_frame("yuv420p", format.height, format.width, format.full_range)
    _scatter(format, planes, frame)
    rgb = colour.reformat(frame, format.matrix, format.full_range, "rgb24")
    assert out.flags.c_contiguous  # else the reshape below would write into a copy
    out.reshape(format.height, -1)[:] = colour.rows(rgb.planes[0])[:, : format.width * 3]


def _gather(frame: av.VideoFrame, format: PlaneFormat, out: np.ndarray) -> None:
    """Copy a frame's planes without their padding."""
    for plane, part in zip(frame.planes, format.split(out)):
        part[:] = colour.rows(plane)[:, : part.shape[1]]


def _fastest_gather(frame: av.VideoFrame, format: PlaneFormat) -> Packer:
    """FFmpeg's encoder of raw video copies small planes in half the time that numpy takes. It is used if PyAV converts
    nothing before: that is tried with noise that is tagged like the frame."""
    encoder = _raw_encoder(frame)
    noise = _noise_like(frame)

    def encode(frame: av.VideoFrame, format: PlaneFormat, out: np.ndarray) -> None:
        (packet,) = encoder.encode(frame)
        out.data[:] = memoryview(packet)

    copied, encoded = np.zeros((2, format.nbytes), np.uint8)
    _gather(noise, format, copied)
    try:
        encode(noise, format, encoded)
    except (av.FFmpegError, ValueError):  # it has padding of its own
        return _gather
    return encode if np.array_equal(copied, encoded) else _gather


def _noise_like(frame: av.VideoFrame) -> av.VideoFrame:
    noise = av.VideoFrame(frame.width, frame.height, frame.format.name)
    noise.colorspace, noise.color_range = frame.colorspace, frame.color_range
    random = np.random.default_rng(0)
    for plane in noise.planes:
        colour.rows(plane)[:] = random.integers(0, 256, colour.rows(plane).shape, np.uint8)
    return noise


def _raw_encoder(frame: av.VideoFrame) -> Any:
    encoder: Any = av.CodecContext.create("rawvideo", "w")
    encoder.width, encoder.height, encoder.pix_fmt = frame.width, frame.height, frame.format.name
    encoder.time_base = Fraction(1, 1)
    encoder.thread_count = 1
    return encoder


def _scatter(format: PlaneFormat, planes: np.ndarray, frame: av.VideoFrame) -> None:
    for plane, part in zip(frame.planes, format.split(planes)):
        colour.rows(plane)[:, : part.shape[1]] = part


def encode_jpeg(format: PlaneFormat, planes: np.ndarray) -> bytes:
    """A frame's planes, uint8 [nbytes], as a JPEG of those values: colour matrix and range stay the camera's."""
    assert not format.is_depth, "JPEG can't hold depth maps"
    if format.layout == "rgba":
        raise FlexorError(
            "JPEG does not support transparency: use --dataset.cache.format=raw for this dataset"
        )
    frame = _jpeg_frame(format)
    _scatter(format, planes, frame)
    if format.layout != "yuv420p":
        frame = colour.reformat(frame, "bt601", True, "yuvj444p")
    key = ("encoder", frame.format.name, format.height, format.width)
    encoder, numbers = colour.per_thread(key, lambda: (_jpeg_encoder(frame), count()))
    frame.pts = next(numbers)
    return b"".join(bytes(packet) for packet in encoder.encode(frame))


def decode_jpeg(format: PlaneFormat, data: bytes | np.ndarray, out: np.ndarray) -> None:
    """A JPEG from `encode_jpeg` -> the planes in `out`, uint8 [nbytes]."""
    decoder = colour.per_thread(("decoder",), lambda: _jpeg_codec("r"))
    try:
        frames = decoder.decode(av.Packet(data))  # type: ignore[arg-type]
    except av.FFmpegError:
        frames = []
    if [(frame.height, frame.width) for frame in frames] != [(format.height, format.width)]:
        raise DatasetError(
            "a frame in the JPEG cache is damaged: delete the cache (`flexor data cache --list` shows its folder), "
            "and Flexor will rebuild it"
        )
    frame = frames[0]
    if format.layout != "yuv420p":
        frame = colour.reformat(frame, "bt601", True, format.layout)
    _gather(frame, format, out)


def _jpeg_frame(format: PlaneFormat) -> av.VideoFrame:
    """This thread's frame of that size; yuv420p is tagged as full range, so that the codec does not convert it."""
    layout = "yuvj420p" if format.layout == "yuv420p" else format.layout
    key = ("jpeg", layout, format.height, format.width)
    return colour.per_thread(key, lambda: av.VideoFrame(format.width, format.height, layout))


def _jpeg_encoder(frame: av.VideoFrame) -> Any:
    encoder = _jpeg_codec("w")
    encoder.width, encoder.height, encoder.pix_fmt = frame.width, frame.height, frame.format.name
    encoder.time_base = Fraction(1, 1)  # the encoder requires one, and numbered frames
    encoder.qmin = encoder.qmax = JPEG_QUALITY
    return encoder


def _jpeg_codec(mode: Literal["r", "w"]) -> Any:
    codec: Any = av.CodecContext.create("mjpeg", mode)
    codec.thread_count = 1  # Flexor has its own threads
    return codec
