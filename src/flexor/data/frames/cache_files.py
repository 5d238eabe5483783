"""The files of one frame cache: creates, checks, writes and flushes them.

Files are written with `pwrite`, never through a mapping: a full disk is then an error that can be handled,
while a page fault would kill the process. Files that must never be seen half-written are written under a
temporary name and renamed.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flexor.core.machine import flush_to_disk
from flexor.core.output_paths import replacing
from flexor.data.frames.cache_folders import VERSION, CacheKey, read_header

PAGE = 4096


@dataclass(frozen=True)
class CachePlan:
    """The properties of the cache to open."""

    key: CacheKey
    frames: int
    slot: int
    layout: dict[str, Any]
    expected: int  # bytes that will be stored

    @property
    def stride(self) -> int:
        """Bytes from the start of one frame to the start of the next."""
        if self.key.jpeg is None:
            return self.slot
        # A JPEG of a tiny or noisy image is larger than its planes. Gaps in a sparse file take no space.
        return -(-(2 * self.slot + PAGE) // PAGE) * PAGE

    def files(self) -> dict[str, int]:
        """The files of the cache and their lengths."""
        files = {"data": self.frames * self.stride, "ready": self.frames, "sums": 8 * self.frames}
        return files if self.key.jpeg is None else {**files, "sizes": 4 * self.frames}

    def identity(self) -> dict[str, Any]:
        """The header that the files must have to be usable."""
        key = self.key
        size = list(key.size) if key.size else None
        content = {"fingerprint": key.fingerprint, "camera": key.camera, "size": size, "jpeg": key.jpeg}
        return {
            "version": VERSION,
            "key": {**content, "features": key.features} if key.features else content,
            "frames": self.frames,
            "slot": self.slot,
            "layout": json.loads(json.dumps(self.layout)),
        }


class Files:
    """A cache's files, open for writing until the last reference to this object is gone."""

    def __init__(self, cache: Path, names: Iterable[str], lasting: bool):
        self.cache = cache
        self.lasting = lasting
        self.descriptors: dict[str, int] = {}
        for name in names:
            self.descriptors[name] = os.open(cache / name, os.O_RDWR | os.O_CLOEXEC)

    def write(self, name: str, place: int, content: np.ndarray | bytes) -> None:
        rest = content.data if isinstance(content, np.ndarray) else memoryview(content)
        while rest:  # a disk that becomes full writes only a part before it fails
            done = os.pwrite(self.descriptors[name], rest, place)
            rest, place = rest[done:], place + done

    def __del__(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)


def try_exclusive_lock(lock: int) -> bool:
    """Take a cache's lock exclusively, if no other process holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def repair_files(cache: Path, plan: CachePlan) -> None:
    """Recreate damaged files and drop marks that may be wrong after a crash. Requires the exclusive lock."""
    header, boot = read_header(cache), boot_id()
    for leftover in cache.glob("*.partial"):
        leftover.unlink()
    if header is None or not matches_plan(cache, header, plan):
        for path in cache.iterdir():
            if path.name != "lock":
                path.unlink()
        flush_to_disk(cache)  # an old mark must not reappear for a new frame
        for name, length in plan.files().items():
            with (cache / name).open("wb") as file:
                if name == "data":
                    file.truncate(length)
                else:  # read completely and often: a hole would need a page that may not be available
                    file.write(bytes(length))
    elif header["boot"] != boot or not boot:
        replace(cache / "ready", synced_marks(cache, plan.frames))
    else:
        return
    write_header(cache, plan, boot)


def write_header(cache: Path, plan: CachePlan, boot: str) -> None:
    header = {**plan.identity(), "dataset": plan.key.dataset, "expected": plan.expected, "boot": boot}
    replace(cache / "header.json", json.dumps(header).encode())


def matches_plan(cache: Path, header: dict[str, Any], plan: CachePlan) -> bool:
    """Whether the header and the lengths of the files are as expected."""
    if not {"boot", "expected"} <= header.keys():
        return False
    fits = all(header.get(name) == value for name, value in plan.identity().items())
    try:
        return fits and all((cache / n).stat().st_size == length for n, length in plan.files().items())
    except OSError:
        return False


def synced_marks(cache: Path, frames: int) -> bytes:
    """The marks that survive a crash of the machine."""
    try:
        marks = (cache / "synced").read_bytes()
    except FileNotFoundError:
        return bytes(frames)
    return marks if len(marks) == frames else bytes(frames)


def boot_id() -> str:
    """An id that changes at every boot of this machine; empty if it is not available."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def replace(path: Path, content: bytes) -> None:
    """Replace a file atomically: it has the old or the new content, even after a power failure."""
    with replacing(path) as aside, aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
