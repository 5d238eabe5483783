"""A request to decode frames in another process, and its answer.

A request names files and frames, and where in shared memory each frame belongs. Where the packets of a file are is in
shared memory too (see `shared_index.py`). The packets of a file on a server come with the request.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise

import av
import numpy as np

from flexor.core.errors import DatasetError, SourceError
from flexor.data.storage.read_time import read_seconds
from flexor.data.video.decode import VideoIndex, bytes_read, decode_frames
from flexor.data.video.planes import PlaneFormat, pack

__all__ = ["DecodeAnswer", "DecodeRequest", "PacketBytes", "decode_request"]


@dataclass(frozen=True, eq=False)
class DecodeRequest:
    """Frames of one camera. A frame may be requested several times: for two rows of a dataset, or two windows."""

    format: PlaneFormat
    places: np.ndarray
    """[3, n] where the index of each frame's file begins, its number in the file, and where its slot begins.

    Frames whose file is negative are left out."""
    packets: dict[int, PacketBytes] = field(default_factory=dict)
    """Of files that only the other process can read, by where their index begins."""

    @property
    def nbytes(self) -> int:
        """Of the decoded frames."""
        return self.format.nbytes * self.places.shape[1]


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


def decode_request(
    request: DecodeRequest,
    slot: Callable[[int, int], np.ndarray],
    index_at: Callable[[int], VideoIndex],
) -> DecodeAnswer:
    """Decode; `slot(offset, bytes)` is a frame's memory, `index_at(offset)` the index that begins there.

    The only errors that it raises are those of the program."""
    answer, format = DecodeAnswer(), _same_format(request.format)
    wall, cpu, read, count = time.perf_counter(), time.thread_time(), read_seconds(), bytes_read()
    order = np.lexsort(request.places[1::-1])
    files, frames, offsets = request.places[:, order]
    edges = [0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), len(files)]
    try:
        for first, end in pairwise(edges):
            part = slice(first, end)
            file = int(files[first])
            if file < 0:
                continue
            index = index_at(file)
            if file in request.packets:
                index = replace(index, ranges=request.packets[file])
            bad = _decode_file(format, index, frames[part], offsets[part], slot)
            answer.bad |= {int(order[first + place]): reason for place, reason in bad.items()}
    except SourceError as error:
        answer.unreachable = str(error)
    answer.wall_s, answer.cpu_s = time.perf_counter() - wall, time.thread_time() - cpu
    answer.read_s, answer.bytes_read = read_seconds() - read, bytes_read() - count
    return answer


@lru_cache
def _same_format(format: PlaneFormat) -> PlaneFormat:
    """The same object for equal formats: comparing it with itself is fast."""
    return format


def _decode_file(
    format: PlaneFormat,
    index: VideoIndex,
    frames: np.ndarray,
    offsets: np.ndarray,
    slot: Callable[[int, int], np.ndarray],
) -> dict[int, str]:
    """Decode frames of one file, ascending, to these offsets; those that can't be decoded, by their place."""
    edges = [0, *(np.flatnonzero(np.diff(frames)) + 1).tolist(), len(frames)]  # of distinct frames
    slots, nbytes = offsets.tolist(), format.nbytes
    missing = dict.fromkeys(range(len(edges) - 1))

    def put(i: int, frame: av.VideoFrame) -> None:
        for offset in slots[edges[i] : edges[i + 1]]:
            pack(frame, format, slot(offset, nbytes))
        del missing[i]

    try:
        bad = decode_frames(index, frames[edges[:-1]], put)
    except SourceError:
        raise
    except DatasetError as error:
        bad = dict.fromkeys(missing, str(error))
    return {place: reason for i, reason in bad.items() for place in range(edges[i], edges[i + 1])}
