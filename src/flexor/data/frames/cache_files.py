"""The files of one frame cache: made, checked, written and brought to the disk.

Written with `pwrite`, never through a mapping: a full disk is then an error that can be handled, where a
page fault would kill the process. Files that must not be seen half-written are written aside and renamed.
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
from flexor.data.frames.cache_folders import CacheKey, read_header

PAGE = 4096


@dataclass(frozen=True)
class Plan:
    """What is to be opened."""

    key: CacheKey
    frames: int
    slot: int
    layout: dict[str, Any]
    expected: int  # bytes that will be put

    @property
    def stride(self) -> int:
        """Bytes from one frame's place to the next one's."""
        if self.key.jpeg is None:
            return self.slot
        # A JPEG of a few pixels, or of noise, is larger than the planes. Holes cost nothing.
        return -(-(2 * self.slot + PAGE) // PAGE) * PAGE

    def files(self) -> dict[str, int]:
        """The files of the cache and how long they are."""
        files = {"data": self.frames * self.stride, "ready": self.frames}
        return files if self.key.jpeg is None else {**files, "sizes": 4 * self.frames}

    def identity(self) -> dict[str, Any]:
        """What the header must say for the files to be of any use."""
        key = self.key
        size = list(key.size) if key.size else None
        return {
            "key": {"fingerprint": key.fingerprint, "camera": key.camera, "size": size, "jpeg": key.jpeg},
            "frames": self.frames,
            "slot": self.slot,
            "layout": json.loads(json.dumps(self.layout)),
        }


class Files:
    """A cache's files, open for writing until the last one who holds this object lets it go."""

    def __init__(self, cache: Path, names: Iterable[str], lasting: bool):
        self.cache = cache
        self.lasting = lasting
        self.descriptors: dict[str, int] = {}
        for name in names:
            self.descriptors[name] = os.open(cache / name, os.O_RDWR | os.O_CLOEXEC)

    def write(self, name: str, place: int, content: np.ndarray | bytes) -> None:
        rest = content.data if isinstance(content, np.ndarray) else memoryview(content)
        while rest:  # a disk that fills up takes a part before it refuses
            done = os.pwrite(self.descriptors[name], rest, place)
            rest, place = rest[done:], place + done

    def __del__(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)


def try_alone(lock: int) -> bool:
    """Hold a cache's lock alone, if nobody else holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def put_in_order(cache: Path, plan: Plan) -> None:
    """The only user makes anew what is not sound, and drops marks that a crash may have made lies."""
    header, boot = read_header(cache), boot_id()
    for leftover in cache.glob("*.partial"):
        leftover.unlink()
    if header is None or not is_sound(cache, header, plan):
        for path in cache.iterdir():
            if path.name != "lock":
                path.unlink()
        flush_to_disk(cache)  # no old mark may come back and stand for a new frame
        for name, length in plan.files().items():
            with (cache / name).open("wb") as file:
                if name == "data":
                    file.truncate(length)
                else:
                    file.write(bytes(length))  # read all over: a hole would need a page when there is none
    elif header["boot"] != boot or not boot:
        replace(cache / "ready", synced_marks(cache, plan.frames))
    else:
        return
    write_header(cache, plan, boot)


def write_header(cache: Path, plan: Plan, boot: str) -> None:
    header = {**plan.identity(), "dataset": plan.key.dataset, "expected": plan.expected, "boot": boot}
    replace(cache / "header.json", json.dumps(header).encode())


def is_sound(cache: Path, header: dict[str, Any], plan: Plan) -> bool:
    """Whether the header is what it should be and the files are as long as they should be."""
    if not {"boot", "expected"} <= header.keys():
        return False
    fits = all(header.get(name) == value for name, value in plan.identity().items())
    try:
        return fits and all((cache / n).stat().st_size == length for n, length in plan.files().items())
    except OSError:
        return False


def synced_marks(cache: Path, frames: int) -> bytes:
    """The marks that outlive a crash of the machine."""
    try:
        marks = (cache / "synced").read_bytes()
    except FileNotFoundError:
        return bytes(frames)
    return marks if len(marks) == frames else bytes(frames)


def boot_id() -> str:
    """Changes whenever this machine starts; empty where that cannot be known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def replace(path: Path, content: bytes) -> None:
    """Old or new, never in between, power or not."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
