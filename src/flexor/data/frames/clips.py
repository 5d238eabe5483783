"""One camera's frames of one episode, in a video file or as images in the frame table."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import av
import numpy as np
import pyarrow as pa
from av.video.reformatter import VideoReformatter

from flexor.core.errors import DatasetError
from flexor.core.log import Repeats
from flexor.data.format.metadata import Feature, read_parquet
from flexor.data.format.table import flat_numbers
from flexor.data.storage.read_time import reading
from flexor.data.storage.source import Source
from flexor.data.video.decode import Sink, VideoIndex, decode_frames, index_video
from flexor.data.video.depth_planes import decode_depth_image
from flexor.data.video.frame_match import FrameBy, NoMatch, match_frames
from flexor.data.video.open_file import decode_one

__all__ = [
    "BlankClip",
    "Clip",
    "FrameRule",
    "ImageClip",
    "ImageFiles",
    "VideoClip",
    "VideoFile",
    "decode_image",
    "image_bytes",
    "image_frame",
]


# decode(distinct numbers ascending, sink) calls sink(i, frame) for number i, and returns {i: reason} of bad frames.
Decode = Callable[[np.ndarray, Sink], dict[int, str]]


class Clip(Protocol):
    """One camera's frames of one episode."""

    @property
    def feature(self) -> Feature:
        """The camera's declaration."""

    @property
    def where(self) -> str:
        """Episode, camera and file, for messages."""

    def starts(self) -> np.ndarray:
        """For every frame, the first frame of the episode that is decoded to get it. [length]"""

    def request(self, frames: np.ndarray) -> tuple[object, Decode, np.ndarray]:
        """Frames of the episode as (their file, the function that decodes it, their numbers in the file)."""


@dataclass(eq=False)
class VideoFile:
    """A video file shared by many episodes; downloaded and indexed at first use."""

    source: Source
    name: str
    feature: Feature
    _index: VideoIndex | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def index(self) -> VideoIndex:
        with self._lock:
            if self._index is None:
                index = index_video(self.source.ranges(self.name))
                self._check_size(index)
                self._index = index
            return self._index

    def replace_index(self, index: VideoIndex) -> None:
        """Use another copy of the index from here on."""
        with self._lock:
            self._index = index

    def _check_size(self, index: VideoIndex) -> None:
        _, height, width = self.feature.chw
        if (index.height, index.width) != (height, width):
            raise DatasetError(
                f"{self.name}: its images are {index.height}x{index.width}, but meta/info.json declares "
                f"{height}x{width} for {self.feature.name}. Correct the shape in meta/info.json"
            )


BY_INDEX = (
    "%d clips have timestamps that do not match their video, but one frame per row:\n"
    "  Flexor uses frame i for row i (--dataset.frame_by changes that)"
)


@dataclass(frozen=True)
class FrameRule:
    """How the clips of a dataset match frames to rows."""

    fps: float
    tolerance_s: float
    frame_by: FrameBy = "auto"
    repeats: Repeats = field(default_factory=Repeats)
    """Collects the warnings about clips with wrong timestamps."""


@dataclass(eq=False)
class VideoClip:
    """An episode in a video file."""

    file: VideoFile
    episode: int
    start: float
    stop: float
    times: np.ndarray  # [length] the episode's timestamps
    rule: FrameRule
    _numbers: np.ndarray | None = None

    @property
    def feature(self) -> Feature:
        return self.file.feature

    @property
    def where(self) -> str:
        return f"episode {self.episode}, camera {self.file.feature.name}, {self.file.name}"

    @property
    def numbers(self) -> np.ndarray:
        """The file's frame number of every frame of the episode."""
        if self._numbers is None:  # two threads may both compute it: the result is the same
            self._numbers = self._match()
        return self._numbers

    def starts(self) -> np.ndarray:
        starts = self.file.index.start[self.numbers]
        _, first, group = np.unique(starts, return_index=True, return_inverse=True)
        return first[group]

    def request(self, frames: np.ndarray) -> tuple[object, Decode, np.ndarray]:
        numbers = self.numbers[frames]  # two may be equal if the recording's clock was irregular
        return self.file, partial(decode_frames, self.file.index), numbers

    def _match(self) -> np.ndarray:
        times, rule = self.file.index.times, self.rule
        try:
            span = self.start, self.stop
            match = match_frames(times, self.times, *span, rule.fps, rule.tolerance_s, rule.frame_by)
        except NoMatch as error:
            raise DatasetError(f"{self.file.name} does not match episode {self.episode}: {error}") from error
        if match.seconds_off:
            clip = f"episode {self.episode}, {self.file.feature.name}"
            rule.repeats.add(BY_INDEX, f"{clip}: up to {match.seconds_off:.2f} s off")
        return match.numbers


class ImageFiles:
    """Columns of encoded images in parquet files; the most recently read files stay in memory.

    LeRobot limits data files to about 100 MB, so a few of them fit in memory. Without them, random access
    would read a whole file for every image.
    """

    keep = 8

    def __init__(self, source: Source):
        self.source = source
        self._recent: OrderedDict[tuple[str, str], pa.Array] = OrderedDict()
        self._lock = threading.Lock()

    def encoded(self, file: str, column: str) -> pa.Array:
        with reading(), self._lock:  # a thread that waits for another one to read the file waits for the file
            if (file, column) not in self._recent:
                self._recent[file, column] = image_bytes(read_parquet(self.source, file, [column])[column])
                while len(self._recent) > self.keep:
                    self._recent.popitem(last=False)
            self._recent.move_to_end((file, column))
            return self._recent[file, column]


def image_bytes(column: pa.ChunkedArray) -> pa.Array:
    """The bytes of each image: of its file, or its pixels. Null for what is no image: decoding reports it."""
    images = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    if pa.types.is_struct(images.type) and images.type.get_field_index("bytes") >= 0:
        images = images.field("bytes")
    is_bytes = pa.types.is_binary(images.type) or pa.types.is_large_binary(images.type)
    return images if is_bytes else _pixel_bytes(column)


def _pixel_bytes(column: pa.ChunkedArray) -> pa.Array:
    values, rows = flat_numbers(column), len(column)
    try:
        pixels = None if values is None or values.null_count else values.cast(pa.uint8())
    except pa.ArrowInvalid:  # not from 0 to 255
        pixels = None
    if pixels is None or not rows or len(pixels) % rows or not len(pixels):
        return pa.nulls(rows, pa.binary())
    data = pixels.to_numpy(zero_copy_only=True)
    size = len(data) // rows
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(size), rows, [None, pa.py_buffer(data)])


@dataclass(eq=False)
class ImageClip:
    """An episode whose images are in the frame table."""

    files: ImageFiles
    file: str
    feature: Feature
    first_row: int
    length: int

    @property
    def where(self) -> str:
        return f"camera {self.feature.name}, {self.file}, from row {self.first_row}"

    def starts(self) -> np.ndarray:
        return np.arange(self.length)

    def request(self, frames: np.ndarray) -> tuple[object, Decode, np.ndarray]:
        return (id(self.files), self.file), self._decode, self.first_row + frames

    def _decode(self, rows: np.ndarray, sink: Sink) -> dict[int, str]:
        encoded = self.files.encoded(self.file, self.feature.name)
        bad = {}
        for i, row in enumerate(rows.tolist()):
            data = encoded[row].as_py()
            try:
                sink(i, image_frame(data or b"", self.feature))
            except (av.FFmpegError, ValueError) as error:
                kinds = "PNG or JPEG" if self.feature.depth is None else "depth map"
                kinds = "pixels as declared" if self.feature.is_array else kinds
                problem = f"not a {kinds} ({error})" if data else "the image is missing"
                bad[i] = f"row {row}: {problem}"
        return bad


@dataclass(eq=False)
class BlankClip:
    """Black images, for an episode of a dataset that lacks a camera which others have."""

    feature: Feature
    length: int

    @property
    def where(self) -> str:
        return f"camera {self.feature.name}, which the dataset does not have"

    def starts(self) -> np.ndarray:
        return np.arange(self.length)

    def request(self, frames: np.ndarray) -> tuple[object, Decode, np.ndarray]:
        return self, self._decode, frames

    def _decode(self, numbers: np.ndarray, sink: Sink) -> dict[int, str]:
        channels, height, width = self.feature.chw
        shape = (height, width) if channels == 1 else (height, width, channels)
        layout = {1: "gray", 3: "rgb24", 4: "rgba"}[channels]
        black = av.VideoFrame.from_ndarray(np.zeros(shape, np.uint8), format=layout)
        for i in range(len(numbers)):
            sink(i, black)
        return {}


def decode_image(data: bytes) -> np.ndarray:
    """PNG or JPEG bytes -> uint8 [H, W, C], with the image's own number of channels."""
    pixels = _picture(data).to_ndarray()
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def image_frame(data: bytes, feature: Feature) -> av.VideoFrame:
    """The bytes of an image of this camera as a frame: in gray, rgb24 or rgba, or with a depth map's own values."""
    if feature.is_array and data[:4] != b"\x89PNG" and data[:2] != b"\xff\xd8":
        return _array_frame(data, feature)
    return _picture(data) if feature.depth is None else decode_depth_image(data)


def _array_frame(data: bytes, feature: Feature) -> av.VideoFrame:
    channels, height, width = feature.chw
    values = np.frombuffer(data, np.uint8)
    if values.size != channels * height * width:
        raise ValueError(f"it has {values.size} values, not {channels * height * width}")
    pixels = values.reshape(feature.shape)
    pixels = pixels if feature.shape == (height, width, channels) else pixels.transpose(1, 2, 0)
    pixels = np.ascontiguousarray(pixels[..., 0] if channels == 1 else pixels)
    return av.VideoFrame.from_ndarray(pixels, format={1: "gray", 3: "rgb24", 4: "rgba"}[channels])


def _picture(data: bytes) -> av.VideoFrame:
    """PNG or JPEG bytes as a frame in gray, rgb24 or rgba."""
    name = "png" if data[:4] == b"\x89PNG" else "mjpeg" if data[:2] == b"\xff\xd8" else None
    if name is None:
        raise ValueError(f"it starts with {data[:4]!r}")
    frame = decode_one(name, data)
    if frame.format.name in ("yuvj420p", "yuvj422p"):
        # Interpolate the chroma as libjpeg (and so PIL and LeRobot) does: a direct conversion to RGB would repeat it.
        frame = VideoReformatter().reformat(frame, format="yuvj444p", interpolation="BILINEAR")
    layout = {"gray": "gray", "ya8": "gray", "rgba": "rgba"}.get(frame.format.name, "rgb24")
    return VideoReformatter().reformat(frame, format=layout)
