"""Bytes of one file by position: what indexing and decoding read through.

Nothing above this module knows whether a file lies on this machine. A local file is read with `pread`,
which needs no position and so no lock.
"""

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

from flexor.errors import DatasetError

__all__ = ["LocalRanges", "Ranges"]

OPEN_FILES = 256
"""Files kept open in this process; datasets have tens of thousands, and systems allow about a thousand."""


class Ranges(Protocol):
    """One file, read by byte ranges. Safe from many threads."""

    name: str
    """For messages: the path or address."""
    size: int

    def read(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes, or a DatasetError."""

    def ahead(self, offset: int, count: int) -> None:
        """Say that these bytes will be read soon. Does not wait."""


class LocalRanges:
    """A file on this machine."""

    def __init__(self, path: str | Path):
        self.name = str(path)
        try:
            status = Path(path).stat()
        except OSError as error:
            raise DatasetError(f"{path} cannot be read: {error.strerror}. Fetch the file again") from error
        self.size = status.st_size
        # A file that is replaced while we run must not be mistaken for the one that is open.
        self._identity = (self.name, status.st_ino, status.st_mtime_ns, status.st_size)

    def read(self, offset: int, count: int) -> bytes:
        file = _open_files.get(self._identity)
        try:
            data = os.pread(file.descriptor, count, offset)
            while len(data) < count:
                more = os.pread(file.descriptor, count - len(data), offset + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise DatasetError(
                f"{self.name}: bytes {offset} to {offset + count} cannot be read: {error.strerror}. "
                f"Check the disk, or fetch the file again"
            ) from error
        if len(data) < count:
            raise DatasetError(
                f"{self.name}: {count} bytes wanted at {offset}, {len(data)} are there. "
                f"The file is cut short: fetch it again"
            )
        return data

    def ahead(self, offset: int, count: int) -> None:
        if hasattr(os, "posix_fadvise"):  # not on macOS
            descriptor = _open_files.get(self._identity).descriptor
            os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_WILLNEED)


class _OpenFile:
    """Closed when nobody holds it any more: a thread may still read from one that was put out of the list."""

    def __init__(self, name: str):
        self.descriptor = os.open(name, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class _OpenFiles:
    """The files read last, open."""

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
            raise DatasetError(
                f"{identity[0]} cannot be opened: {error.strerror}. Fetch the file again"
            ) from error
        with self._lock:
            self._files[identity] = file
            while len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)
        return file


_open_files = _OpenFiles()
