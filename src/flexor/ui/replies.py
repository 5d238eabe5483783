"""What the application's server answers: JSON, pages, files of which a browser may ask parts, and streams of lines."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from flexor.core.errors import FlexorError
from flexor.core.secrets import redacted_values
from flexor.pages.page import as_json

PIECE = 1 << 18  # bytes of a file that are sent at once
PACKED_FROM = 2000  # bytes; a shorter reply is sent as it is


class NotFound(FlexorError):
    """A request for something that does not exist."""


@dataclass(frozen=True)
class Request:
    """`words`: the parts of the path after the name of the route."""

    words: list[str]
    query: dict[str, str]
    content: dict[str, Any]
    """Of a request that writes."""


@dataclass
class Reply:
    body: bytes
    kind: str
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def packed(self) -> Reply:
        """Compressed: worth it for a browser behind a tunnel."""
        if len(self.body) < PACKED_FROM:
            return self
        headers = {**self.headers, "Content-Encoding": "gzip"}
        return Reply(gzip.compress(self.body, 1), self.kind, self.status, headers)


def json_reply(value: Any, status: int = 200) -> Reply:
    text = as_json(redacted_values(value))
    return Reply(text.encode(errors="replace"), "application/json", status)


@dataclass
class FileReply:
    """A file, or the bytes of one."""

    source: Path | bytes
    kind: str

    def size(self) -> int:
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size

    def pieces(self, first: int, count: int) -> Iterator[bytes]:
        if isinstance(self.source, bytes):
            yield self.source[first : first + count]
            return
        with self.source.open("rb") as file:
            file.seek(first)
            yield from _pieces(file, count)


def _pieces(file: BinaryIO, count: int) -> Iterator[bytes]:
    while count > 0 and (data := file.read(min(count, PIECE))):
        count -= len(data)
        yield data


@dataclass
class LinesReply:
    """JSON values, each sent as a line as soon as it is there."""

    values: Iterator[dict[str, Any]]


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """The first byte and the number of bytes that a `Range` header asks for; None for the whole file.

    ValueError: the range is not in the file. Several ranges are answered with the whole file, as the standard allows.
    """
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", (header or "").strip())
    if match is None or match[0] == "bytes=-":
        return None
    begin, end = match[1], match[2]
    if not begin:  # the last bytes
        count = min(int(end), size)
        if count == 0:
            raise ValueError
        return size - count, count
    first, last = int(begin), min(int(end), size - 1) if end else size - 1
    if first > last:
        raise ValueError
    return first, last - first + 1
