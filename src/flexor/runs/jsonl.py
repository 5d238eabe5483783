"""A file of JSON lines that another program is writing: each call returns the new complete lines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from flexor.core.foreign_files import parse_json


class GrowingLines:
    """Reads a file while it grows. A line is read once it is complete; one that is not JSON is counted and skipped."""

    def __init__(self, path: Path):
        self.path = path
        self.damaged = 0
        self.written: float | None = None
        """When the file was last written to, in seconds since 1970; None if there is no file."""
        self._file: tuple[int, int] | None = None  # device and inode
        self._offset = 0

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file was replaced since the last call (a resumed run writes a new one), and the new lines."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                restarted = self._begin(status)
                file.seek(self._offset)
                data = file.read()
        except OSError:
            gone, self._file, self.written = self._file is not None, None, None
            return gone, []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return restarted, [line for text in complete.split(b"\n") if (line := self._parse(text)) is not None]

    def _begin(self, status: os.stat_result) -> bool:
        self.written = status.st_mtime
        file = (status.st_dev, status.st_ino)
        if file == self._file and status.st_size >= self._offset:
            return False
        restarted, self._file = self._file is not None, file
        self._offset = self.damaged = 0
        return restarted

    def _parse(self, text: bytes) -> dict[str, Any] | None:
        if not text.strip():
            return None
        try:
            line = parse_json(text)
        except ValueError:  # also for bytes that are not UTF-8
            line = None
        if not isinstance(line, dict):
            self.damaged += 1
            return None
        return line
