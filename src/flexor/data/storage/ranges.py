"""Reads byte ranges of one file, for indexing and decoding.

Code above this module does not know whether a file is local. A local file is read with `pread`, which needs
no file position and so no lock. A remote file is read in blocks. Each block is requested once and cached on
disk; this reads some unneeded bytes, but needs far fewer requests.
"""

import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from flexor.core.errors import DatasetError, SourceError
from flexor.core.log import log
from flexor.data.storage.block_cache import BLOCK, BlockCache
from flexor.data.storage.read_time import reading
from flexor.data.storage.remote import LONGEST_REQUEST, RemoteFile, read_part

__all__ = ["LocalRanges", "Ranges", "RemoteRanges"]

OPEN_FILES = 256
"""Files kept open in this process: datasets have tens of thousands, and systems allow about a thousand."""

AHEAD_THREADS = 4
AHEAD_BYTES = 128 * BLOCK
"""Largest number of running and waiting read-ahead requests; further ones are dropped."""


class Ranges(Protocol):
    """One file, read by byte ranges. Safe to use from several threads."""

    name: str
    """The path or URL, for messages."""
    size: int

    def read(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes; a SourceError if the file can't be reached, a DatasetError if it is too short."""

    def ahead(self, offset: int, count: int) -> None:
        """Announce that these bytes will be read soon. Does not wait."""


class LocalRanges:
    """A file on this machine."""

    def __init__(self, path: str | Path):
        self.name = str(path)
        try:
            status = Path(path).stat()
        except OSError as error:
            raise SourceError(f"{path} can't be read: {error.strerror}. Download the file again") from error
        self.size = status.st_size
        # A file that is replaced during the run must not be mistaken for the open one.
        self._identity = (self.name, status.st_ino, status.st_mtime_ns, status.st_size)

    def read(self, offset: int, count: int) -> bytes:
        try:
            with reading():
                data = self._pread(offset, count)
        except OSError as error:
            raise SourceError(
                f"{self.name}: bytes {offset} to {offset + count} can't be read: {error.strerror}. "
                f"Check the disk, or download the file again"
            ) from error
        if len(data) < count:
            raise DatasetError(
                f"{self.name}: expected {count} bytes at {offset}, got {len(data)}. "
                f"The file is truncated: download it again"
            )
        return data

    def _pread(self, offset: int, count: int) -> bytes:
        file = _open_files.get(self._identity)
        data = os.pread(file.descriptor, count, offset)
        while len(data) < count:
            more = os.pread(file.descriptor, count - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def ahead(self, offset: int, count: int) -> None:
        if hasattr(os, "posix_fadvise"):  # not on macOS
            descriptor = _open_files.get(self._identity).descriptor
            os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_WILLNEED)


class _OpenFile:
    """Closed when nothing references it: a thread may still read from a file that was removed from the list."""

    def __init__(self, name: str):
        self.descriptor = os.open(name, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class _OpenFiles:
    """The most recently read files, open."""

    def __init__(self) -> None:
        self._files: OrderedDict[tuple[str, int, int, int], _OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, identity: tuple[str, int, int, int]) -> _OpenFile:
        with self._lock:
            file = self._files.get(identity)
            if file is not None:
                self._files.move_to_end(identity)
                return file
        try:
            file = _OpenFile(identity[0])
        except OSError as error:
            raise SourceError(
                f"{identity[0]} can't be opened: {error.strerror}. Download the file again"
            ) from error
        with self._lock:
            self._files[identity] = file
            while len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)
        return file


_open_files = _OpenFiles()


class RemoteRanges:
    """A file on a server, read in blocks; adjacent blocks that are not cached are read in one request."""

    def __init__(self, file: RemoteFile, blocks: BlockCache):
        self.name, self.size = file.name, file.size
        self._file, self._cache = file, blocks
        self._lock = threading.Lock()
        self._pending: dict[int, Future[bytes]] = {}  # blocks that a thread is downloading

    def read(self, offset: int, count: int) -> bytes:
        if count <= 0:
            return b""
        if offset < 0 or offset + count > self.size:
            raise DatasetError(
                f"{self.name}: expected {count} bytes at {offset}, but the file has {self.size}. "
                f"The file is truncated, or its index is damaged: replace it at its source"
            )
        with reading():
            return self._read(offset, count)

    def _read(self, offset: int, count: int) -> bytes:
        numbers = range(offset // BLOCK, -(-(offset + count) // BLOCK))
        parts = [(n, max(offset - n * BLOCK, 0), min(offset + count - n * BLOCK, BLOCK)) for n in numbers]
        # Small parts of cached blocks do not need to be read as whole blocks.
        cached = [self._cache.get(self._file.identity, n, self._size_of(n), *part) for n, *part in parts]
        data = [part for part in cached if part is not None]
        if len(data) < len(parts):
            blocks = self._blocks(numbers)
            data = [block[begin:end] for block, (_, begin, end) in zip(blocks, parts)]
        return data[0] if len(data) == 1 else b"".join(data)

    def _size_of(self, number: int) -> int:
        return min(BLOCK, self.size - number * BLOCK)

    def ahead(self, offset: int, count: int) -> None:
        numbers = range(offset // BLOCK, -(-min(offset + count, self.size) // BLOCK))
        for run in _runs([n for n in numbers if not self._cache.has(self._file.identity, n)]):
            _read_ahead.submit(self, run)

    def _blocks(self, numbers: range) -> list[bytes]:
        """These blocks: from the cache, from the server, or from the thread that is already downloading them.

        A thread claims a block before it checks the cache, so that two threads never download the same block.
        It downloads its claimed blocks before it waits for others, so that threads never deadlock.
        """
        claimed: dict[int, Future[bytes]] = {}
        with self._lock:
            futures = {n: self._pending.get(n) for n in numbers}
            for n in [n for n, future in futures.items() if future is None]:
                self._pending[n] = claimed[n] = futures[n] = Future()
        try:
            self._get(claimed)
        except BaseException as error:
            for future in claimed.values():
                if not future.done():
                    future.set_exception(error)
            raise
        finally:
            with self._lock:
                for n in claimed:
                    del self._pending[n]
        return [future.result() for future in futures.values() if future is not None]

    def _get(self, claimed: dict[int, Future[bytes]]) -> None:
        missing = []
        for n, future in claimed.items():
            data = self._cache.get(self._file.identity, n, self._size_of(n))
            if data is None:
                missing.append(n)
            else:
                future.set_result(data)
        for run in _runs(missing):
            start, end = run.start * BLOCK, min(run.stop * BLOCK, self.size)
            data = read_part(self._file, start, end)
            for n in run:
                block = data[n * BLOCK - start : (n + 1) * BLOCK - start]
                claimed[n].set_result(block)
                self._cache.put(self._file.identity, n, block)


def _runs(numbers: list[int]) -> Iterator[range]:
    """Group ascending numbers into runs of adjacent ones, each at most one request long."""
    start = 0
    for i, number in enumerate(numbers):
        last = i + 1 == len(numbers) or numbers[i + 1] != number + 1
        if last or (i + 1 - start) * BLOCK >= LONGEST_REQUEST:
            yield range(numbers[start], number + 1)
            start = i + 1


class _ReadAhead:
    """Downloads blocks in a few threads. They are daemon threads, so they do not delay the program's exit."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[RemoteRanges, range]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._bytes = 0

    def submit(self, ranges: RemoteRanges, run: range) -> None:
        with self._lock:
            if self._bytes + len(run) * BLOCK > AHEAD_BYTES:
                return  # only a hint: other blocks are read when they are needed
            self._bytes += len(run) * BLOCK
            if self._threads < AHEAD_THREADS:
                self._threads += 1
                threading.Thread(target=self._work, name="read-ahead", daemon=True).start()
        self._queue.put((ranges, run))

    def _work(self) -> None:
        while True:
            ranges, run = self._queue.get()
            try:
                ranges._blocks(run)
            except Exception as error:
                log.debug(
                    "read-ahead of %s: %s", ranges.name, error
                )  # the reader of the block gets the error
            finally:
                with self._lock:
                    self._bytes -= len(run) * BLOCK


_read_ahead = _ReadAhead()
