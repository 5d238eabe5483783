"""A process that decodes for the loader of another one, into shared memory.

It reads requests from a socket and answers each (see `decode_request.py`). It imports little, so that it starts fast
and many of them fit in memory. It ends when its parent ends, however that happens.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
import signal
import socket
import struct
import sys
import traceback
from collections import OrderedDict
from contextlib import suppress

import numpy as np

from flexor.data.video.decode import VideoIndex
from flexor.data.video.decode_request import DecodeAnswer, decode_request
from flexor.data.video.shared_index import read_index

__all__ = ["IGNORED_SIGNALS", "LENGTH", "main", "message"]

LENGTH = struct.Struct("<Q")
"""A message begins with its length."""
IGNORED_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT")
    if hasattr(signal, name)
)
"""They are for the parent, which may still need frames to end as it should."""
PARENT_CHECK_S = 1.0
MOST_INDEXES = 256  # views of shared memory: they take some kilobytes each


def message(content: object) -> bytes:
    """An object as it is sent."""
    data = pickle.dumps(content, protocol=5)
    return LENGTH.pack(len(data)) + data


def main() -> None:
    """Arguments: the socket, the memory for frames, that with indexes of files, and the parent's process id."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    connection, frames, indexes, parent = map(int, sys.argv[1:])
    with suppress(ConnectionError, EOFError):  # the parent has ended, or needs this process no longer
        serve(
            socket.socket(fileno=connection), SharedSlots(frames), FileIndexes(SharedSlots(indexes)), parent
        )
    os._exit(0)  # nothing needs to be cleaned up


def serve(connection: socket.socket, frames: SharedSlots, indexes: FileIndexes, parent: int) -> None:
    """Answer requests until the parent closes the connection."""
    while True:
        while not select.select([connection], [], [], PARENT_CHECK_S)[0]:
            if os.getppid() != parent:  # another process, forked from it, may have the connection open
                return
        (length,) = LENGTH.unpack(receive(connection, LENGTH.size))
        request = pickle.loads(receive(connection, length))  # noqa: S301  (from the parent)
        try:
            answer = decode_request(request, frames.slot, indexes.index)
        except Exception:
            answer = DecodeAnswer(failure=traceback.format_exc())
        connection.sendall(message(answer))


def receive(connection: socket.socket, count: int) -> bytearray:
    """Exactly this many bytes."""
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]
    return data


class FileIndexes:
    """Indexes in the parent's memory; the most recently used ones are kept."""

    def __init__(self, memory: SharedSlots):
        self.memory = memory
        self._indexes: OrderedDict[int, VideoIndex] = OrderedDict()

    def index(self, offset: int) -> VideoIndex:
        if offset not in self._indexes:
            self._indexes[offset] = read_index(offset, self.memory.slot)
            while len(self._indexes) > MOST_INDEXES:
                self._indexes.popitem(last=False)
        self._indexes.move_to_end(offset)
        return self._indexes[offset]


class SharedSlots:
    """The parent's memory; it grows."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self.memory = np.empty(0, np.uint8)

    def slot(self, offset: int, nbytes: int) -> np.ndarray:
        if offset + nbytes > len(self.memory):
            size = os.fstat(self.descriptor).st_size
            self.memory = np.frombuffer(mmap.mmap(self.descriptor, size), np.uint8)
        return self.memory[offset : offset + nbytes]


if __name__ == "__main__":
    main()
