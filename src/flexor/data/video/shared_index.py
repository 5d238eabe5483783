"""Indexes of video files in shared memory: written by one process, and used by others without a copy.

So an index is in memory once, for any number of decode processes, and a request to them only names frames.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable

import numpy as np

from flexor.data.video.decode import VideoIndex

__all__ = ["read_index", "write_index"]

LENGTH = struct.Struct("<Q")


def write_index(index: VideoIndex, take: Callable[[int], tuple[int, np.ndarray]]) -> tuple[int, VideoIndex]:
    """Write an index to memory; `take(bytes)` gives some, with where it begins. Returns where the index begins, and the
    index with its arrays there."""
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(index, protocol=5, buffer_callback=buffers.append)
    places, arrays = [], []
    for buffer in buffers:
        data = buffer.raw()
        offset, memory = take(len(data))
        memory[:] = np.frombuffer(data, np.uint8)
        places.append((offset, len(data)))
        arrays.append(memory)
    head = pickle.dumps((content, places))
    offset, memory = take(LENGTH.size + len(head))
    memory[:] = np.frombuffer(LENGTH.pack(len(head)) + head, np.uint8)
    return offset, pickle.loads(content, buffers=arrays)  # noqa: S301  (of this process)


def read_index(offset: int, slot: Callable[[int, int], np.ndarray]) -> VideoIndex:
    """The index that begins there; `slot(offset, bytes)` is memory. Its arrays are views of it."""
    (length,) = LENGTH.unpack(slot(offset, LENGTH.size).tobytes())
    head = slot(offset + LENGTH.size, length).tobytes()
    content, places = pickle.loads(head)  # noqa: S301  (from a process of ours)
    index: VideoIndex = pickle.loads(content, buffers=[slot(*place) for place in places])  # noqa: S301
    return index
