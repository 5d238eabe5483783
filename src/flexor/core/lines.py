"""A file of lines that never ends a run: on a full disk, lines wait until there is room."""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from pathlib import Path

from flexor.core.log import log

MOST_WAITING = 10_000  # lines; then the oldest are dropped


class LineFile:
    """Appends lines. A line is written completely or not at all, so that readers never meet a half one."""

    def __init__(self, path: Path):
        self.path = path
        self.waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        self._file: int | None = None
        self._told = False
        self._write_waiting()  # creates the file

    def write(self, line: str) -> None:
        self.waiting.append(f"{line}\n".encode())
        self._write_waiting()

    def close(self) -> None:
        """Writing again opens it again."""
        self._write_waiting()
        if self.waiting:
            log.warning(
                "%s lacks its last %d lines, which could not be written", self.path, len(self.waiting)
            )
            self.waiting.clear()
        self._close()

    def _write_waiting(self) -> None:
        try:
            if self._file is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._file = os.open(self.path, flags, 0o666)
            while self.waiting:
                _append(self._file, self.waiting[0])
                self.waiting.popleft()
            self._told = False
        except OSError as error:
            self._close()  # a network file system may want it opened anew
            if not self._told:
                self._told = True
                log.warning(
                    "can't write to %s (%s). The run continues; its lines are written once that is possible",
                    self.path,
                    error.strerror,
                )

    def _close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None


def _append(file: int, line: bytes) -> None:
    end = os.fstat(file).st_size
    rest = memoryview(line)
    try:
        while rest:  # a disk that becomes full takes a part of it before it fails
            rest = rest[os.write(file, rest) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(file, end)
        raise
