"""A request to decode frames in another process, and its answer.

A request contains all that decoding needs: the positions of the packets, or the packets themselves if the file is on a
server, and where in shared memory each frame belongs. So a decode process knows nothing about the dataset.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import av
import numpy as np

from flexor.core.errors import DatasetError, SourceError
from flexor.data.storage.ranges import LocalRanges, Ranges
from flexor.data.storage.read_time import read_seconds
from flexor.data.video.decode import VideoIndex, bytes_read, decode_frames, packet_ranges, packets_together
from flexor.data.video.planes import PlaneFormat, pack

__all__ = ["DecodeAnswer", "DecodeRequest", "FramesOfFile", "decode_request", "frames_of_file"]


@dataclass(frozen=True, eq=False)
class FramesOfFile:
    """Distinct frames of one video file, and the slots of each; two rows of a dataset may have the same frame."""

    index: VideoIndex
    """Of these frames and the packets that they need, and nothing else of the file."""
    edges: np.ndarray  # [F + 1] the first slot of each frame in `offsets` and `places`
    offsets: np.ndarray  # [n] where a slot begins in shared memory
    places: np.ndarray  # [n] the number of the frame in the request


@dataclass(frozen=True, eq=False)
class DecodeRequest:
    """Frames of one camera."""

    format: PlaneFormat
    files: list[FramesOfFile]

    @property
    def nbytes(self) -> int:
        """Of the decoded frames."""
        return self.format.nbytes * sum(len(frames.offsets) for frames in self.files)


@dataclass
class DecodeAnswer:
    """What became of a request."""

    bad: dict[int, str] = field(default_factory=dict)
    """Frames that can't be decoded, and why."""
    unreachable: str | None = None
    """Why a file can't be read at all."""
    failure: str | None = None
    """An error of the program, with where it happened."""
    bytes_read: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    read_s: float = 0.0


class PacketBytes:
    """Packets that were read already, as the parts of a file."""

    def __init__(self, name: str, size: int, parts: list[tuple[int, bytes]]):
        self.name, self.size = name, size
        self.parts = sorted(parts, key=lambda part: part[0])  # first byte, bytes
        self._first = [first for first, _ in self.parts]

    def read(self, offset: int, count: int) -> bytes:
        first, data = self.parts[bisect_right(self._first, offset) - 1]
        return data[offset - first : offset - first + count]

    def ahead(self, offset: int, count: int) -> None:
        """Nothing to do: all of it is here."""


def frames_of_file(
    index: VideoIndex, frames: np.ndarray, offsets: np.ndarray, places: np.ndarray
) -> FramesOfFile:
    """frames[i], a number in the file, belongs at offsets[i] and is number places[i] of the request."""
    order = np.argsort(frames, kind="stable")
    frames = frames[order]
    is_first = np.append(True, frames[1:] != frames[:-1])
    edges = np.append(np.flatnonzero(is_first), len(frames))
    return FramesOfFile(_part(index, frames[is_first]), edges, offsets[order], places[order])


def _part(index: VideoIndex, frames: np.ndarray) -> VideoIndex:
    """The index of some frames, in the order of the file: with the packets that they need."""
    spans = packet_ranges(index, frames)
    first = np.array([span[0] for span in spans])
    # One more packet, which nothing needs, stays between ranges: they are decoded separately, as in the whole file.
    length = np.array([end - first + 1 for first, end, _ in spans])
    begin = np.cumsum(length) - length
    numbers = np.arange(length.sum()) + np.repeat(first - begin, length)
    numbers = np.minimum(numbers, len(index.packets) - 1)
    shift = (begin - first)[np.searchsorted(first, index.start[frames], side="right") - 1]
    packets = index.packets
    some = replace(
        packets,
        offset=packets.offset[numbers],
        size=packets.size[numbers],
        key=packets.key[numbers],
        pts=packets.pts[numbers],
        hidden=packets.hidden[numbers],
    )
    return VideoIndex(
        ranges=_readable_elsewhere(index, spans),
        packets=some,
        packet=index.packet[frames] + shift,
        frame_pts=index.frame_pts[frames],
        times=index.times[frames],
        start=index.start[frames] + shift,
    )


def _readable_elsewhere(index: VideoIndex, spans: list[tuple[int, int, int]]) -> Ranges:
    """The file, for another process: local files are opened there, of others the packets are read here."""
    ranges = index.ranges
    if isinstance(ranges, LocalRanges):
        return ranges
    parts = []
    for first, end, _ in spans:
        for low, high in packets_together(index, first, end):
            parts.append((low, ranges.read(low, high - low)))
    return PacketBytes(ranges.name, ranges.size, parts)


def decode_request(request: DecodeRequest, slot: Callable[[int, int], np.ndarray]) -> DecodeAnswer:
    """Decode; `slot(offset, bytes)` is a frame's memory. The only errors that it raises are those of the program."""
    answer = DecodeAnswer()
    wall, cpu, read, count = time.perf_counter(), time.thread_time(), read_seconds(), bytes_read()
    try:
        for frames in request.files:
            answer.bad |= _decode_file(request.format, frames, slot)
    except SourceError as error:
        answer.unreachable = str(error)
    answer.wall_s, answer.cpu_s = time.perf_counter() - wall, time.thread_time() - cpu
    answer.read_s, answer.bytes_read = read_seconds() - read, bytes_read() - count
    return answer


def _decode_file(
    format: PlaneFormat, frames: FramesOfFile, slot: Callable[[int, int], np.ndarray]
) -> dict[int, str]:
    """Decode the frames of one file; the frames that can't be decoded, by their number in the request."""
    edges, offsets, places = frames.edges.tolist(), frames.offsets.tolist(), frames.places.tolist()
    missing = dict.fromkeys(range(len(edges) - 1))
    nbytes = format.nbytes

    def put(i: int, frame: av.VideoFrame) -> None:
        for offset in offsets[edges[i] : edges[i + 1]]:
            pack(frame, format, slot(offset, nbytes))
        del missing[i]

    try:
        bad = decode_frames(frames.index, np.arange(len(edges) - 1), put)
    except SourceError:
        raise
    except DatasetError as error:
        bad = dict.fromkeys(missing, str(error))
    return {place: reason for i, reason in bad.items() for place in places[edges[i] : edges[i + 1]]}
