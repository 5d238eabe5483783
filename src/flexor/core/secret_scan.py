"""Searches the files of an upload for passwords and tokens, whatever the files are named and however large they are.

A token is a long run of letters and digits, and bytes of a video or a table are not: 20 such bytes in a row come up by
chance once in 10^11. So every fourth byte is looked at first, and only places where such a run may be are read closely.
That takes about as long as hashing the file, which an upload does anyway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from flexor.core.secrets import FORMS, HIDDEN, PRIVATE_KEY, SHORTEST_TOKEN, TOKEN_LETTERS

BLOCK = 1 << 20
OVERLAP = 4096  # a secret that begins in one block and ends in the next
STRIDE = 4  # every fourth byte
BESIDE = 64  # bytes before and after a run: the line above a private key, a boundary of a token
HEADER = 100_000_000  # bytes; the longest that safetensors allows

_URL_PASSWORD = rf"://[^\s/?#\"'<>:@]+:(?!{re.escape(HIDDEN)})[^\s/?#\"'<>]+@[A-Za-z0-9]"
_FORMS = (
    *FORMS,
    ("a private key", "PRIVATE KEY-----", PRIVATE_KEY),
    ("a password in a URL", "://", _URL_PASSWORD),
)
_PATTERNS = [(label, begin.encode(), re.compile(form.encode())) for label, begin, form in _FORMS]
_RUN = re.compile(rf"[{TOKEN_LETTERS}]{{{SHORTEST_TOKEN},}}".encode())
_LETTER = re.compile(rf"[{TOKEN_LETTERS}]".encode())
_IS_LETTER = bytes(_LETTER.match(bytes([value])) is not None for value in range(256))
_SAMPLED_RUN = b"\1" * (SHORTEST_TOKEN // STRIDE)


def find_secret(content: Path | bytes, own_secrets: dict[str, str]) -> str | None:
    """What a file contains that others must not read; None if nothing. `own_secrets`: the user's, by value."""
    encoded = {value.encode(errors="surrogateescape"): label for value, label in own_secrets.items()}
    secrets = {value: f"your {label}" for value, label in encoded.items()}
    for block in _blocks(content, max([OVERLAP, *map(len, secrets)])):
        label = _find(block, secrets)
        if label is not None:
            return label
    return None


def _blocks(content: Path | bytes, overlap: int) -> Iterator[bytes]:
    """The content in blocks that overlap. Of weights only the header: all that follows it are numbers."""
    if isinstance(content, bytes):
        yield content
        return
    size = _weights_header(content) or content.stat().st_size
    with content.open("rb") as file:
        block = b""
        while size > 0 and (read := file.read(min(BLOCK, size))):
            block = block[-overlap:] + read
            size -= len(read)
            yield block


def _weights_header(file: Path) -> int | None:
    """Bytes of the header of a safetensors file whose tensors fill the rest of it; None for any other file."""
    if file.suffix != ".safetensors":
        return None
    try:
        with file.open("rb") as opened:
            header = int.from_bytes(opened.read(8), "little")
            entries = json.loads(opened.read(header)) if header <= HEADER else {}
        spans = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
        filled = sum(end - begin for begin, end in spans if 0 <= begin <= end)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return 8 + header if 8 + header + filled == file.stat().st_size else None


def _find(block: bytes, secrets: dict[bytes, str]) -> str | None:
    for value, label in secrets.items():
        if (len(value) < SHORTEST_TOKEN or not _RUN.fullmatch(value)) and value in block:
            return label
    for run in _runs(block):
        part = block[max(run.start() - BESIDE, 0) : run.end() + BESIDE]
        for value, label in secrets.items():
            if value in part:
                return label
        for label, begin, pattern in _PATTERNS:
            if begin in part and pattern.search(part):
                return label
    return None


def _runs(block: bytes) -> Iterator[re.Match[bytes]]:
    """The runs of letters in a block that are long enough for a token."""
    sampled = block[::STRIDE].translate(_IS_LETTER)
    at = sampled.find(_SAMPLED_RUN)
    while at >= 0:
        end = sampled.find(b"\0", at)
        end = len(sampled) if end < 0 else end
        yield from _RUN.finditer(block, max((at - 1) * STRIDE, 0), (end + 1) * STRIDE)
        at = sampled.find(_SAMPLED_RUN, end)
