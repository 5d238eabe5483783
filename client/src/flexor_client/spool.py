"""Records that a learner has not acknowledged yet, in a file of the actor's disk: they outlive the network, the learner
and the actor.

A spool has an id, and numbers its records from 1 on. The learner takes each number of an id once, so a record that is
sent again is never learned from twice.
"""

from __future__ import annotations

import itertools
import logging
import os
import struct
import threading
import uuid
import zlib
from collections import deque
from pathlib import Path

from flexor_client.errors import ClientError

log = logging.getLogger("flexor_client")

MAGIC = b"flexor-spool-1\n\0"
HEADER = struct.Struct("<16s16sQ")  # magic, id, number of the last record before this file's first
ENTRY = struct.Struct("<II")  # length and checksum of a record
REWRITE_BYTES = 2**20  # of acknowledged records, before the file is begun anew


class Spool:
    """`folder`: where the file is; None: in memory only, and what was not handed over ends with the process."""

    def __init__(self, folder: str | Path | None = None):
        self._lock = threading.Lock()
        self._pending: deque[tuple[int, int]] = (
            deque()
        )  # place and length in the file; without one, number and 0
        self._memory: dict[int, bytes] = {}
        self._file = -1
        self.id, self.acknowledged = uuid.uuid4().hex, 0
        self.path = None if folder is None else Path(folder) / "records.spool"
        if self.path is not None:
            self._open(self.path)

    @property
    def last(self) -> int:
        """The number of the newest record."""
        return self.acknowledged + len(self._pending)

    def append(self, record: bytes) -> int:
        """Keep a record; its number."""
        with self._lock:
            number = self.last + 1
            if self._file < 0:
                self._memory[number] = record
                self._pending.append((number, 0))
                return number
            entry = ENTRY.pack(len(record), zlib.crc32(record)) + record
            self._write(entry)
            self._pending.append((self._size + ENTRY.size, len(record)))
            self._size += len(entry)
            return number

    def after(self, number: int, most: int, most_bytes: int) -> list[bytes]:
        """The records after this number: at most so many, and so many bytes, but one at least if there is one."""
        with self._lock:
            records: list[bytes] = []
            first = number - self.acknowledged
            for place, length in itertools.islice(self._pending, first, first + most):
                record = self._memory[place] if self._file < 0 else os.pread(self._file, length, place)
                if records and sum(map(len, records)) + len(record) > most_bytes:
                    break
                records.append(record)
            return records

    def acknowledge(self, number: int) -> None:
        """Forget the records up to this number: the learner has them.

        It may have more than the spool, if a loss of power took the file's end: then numbers go on after the learner's.
        """
        with self._lock:
            while self._pending and self.acknowledged < number:
                place, _ = self._pending.popleft()
                self._memory.pop(place, None)
                self.acknowledged += 1
            ahead = number > self.acknowledged
            self.acknowledged = max(number, self.acknowledged)
            if self._file >= 0 and not self._pending and (ahead or self._size > REWRITE_BYTES):
                assert self.path is not None
                self._begin(self.path)

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                os.close(self._guard)
                self._file = -1

    def _open(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._guard = _locked(path.with_name(".lock"))
            if path.exists():
                self._file = os.open(path, os.O_RDWR)
                self._read(path)
            else:
                self._begin(path)
        except OSError as error:
            raise ClientError(f"The spool {path} can't be used: {error}. Choose another folder.") from error

    def _begin(self, path: Path) -> None:
        """A file without records. It replaces the last one in a single call."""
        temporary = path.with_name(f".{path.name}")
        temporary.write_bytes(HEADER.pack(MAGIC, bytes.fromhex(self.id), self.acknowledged))
        temporary.replace(path)
        if self._file >= 0:
            os.close(self._file)
        self._file = os.open(path, os.O_RDWR)
        self._size = HEADER.size

    def _read(self, path: Path) -> None:
        """Take the records of an earlier process. An incomplete one at the end is cut off."""
        header, end = os.pread(self._file, HEADER.size, 0), os.fstat(self._file).st_size
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise ClientError(f"{path} is no spool of records. Choose another folder.")
        _, identity, self.acknowledged = HEADER.unpack(header)
        self.id, self._size = identity.hex(), HEADER.size
        while self._size + ENTRY.size <= end:
            length, checksum = ENTRY.unpack(os.pread(self._file, ENTRY.size, self._size))
            place = self._size + ENTRY.size
            if place + length > end or zlib.crc32(os.pread(self._file, length, place)) != checksum:
                break
            self._pending.append((place, length))
            self._size = place + length
        if self._size < end:
            log.warning(
                "%s ends with %d bytes that are no complete record: they are cut off.", path, end - self._size
            )
            os.ftruncate(self._file, self._size)

    def _write(self, entry: bytes) -> None:
        try:
            written = os.pwrite(self._file, entry, self._size)
            if written != len(entry):
                raise OSError(28, "the disk is full")
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise ClientError(
                f"A record can't be written to {self.path}: {error}. Free some space."
            ) from error


def _locked(path: Path) -> int:
    """A file that only one process has open: two actors with the same numbers would lose records."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        import fcntl
    except ImportError:  # not on Windows
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise ClientError(
            f"{path.parent} is in use by another actor: choose another folder for each."
        ) from error
    return file
