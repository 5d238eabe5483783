"""The folders of frame caches: which caches exist, which are in use, which may be removed.

Caches on disk are stored under the cache folder and stay there. Caches in RAM are in shared memory, one copy
for all ranks of a node, and are removed with their last user. Each cache is a folder, named after its content:

    lock          held shared (flock) by every process that uses the cache; its mtime is the last use
    header.json   content and format of the cache; written last: a cache without it is incomplete
    data          every frame at its own place, with holes for frames that are not cached yet
    sizes         JPEG only: bytes of each frame
    sums          a checksum of each frame
    ready         one byte per frame: may be read (within the boot in which it was written)
    synced        a copy of `ready`, made when all those frames were safely on the disk

Opening, inspecting and removing take one lock for the whole folder, so that no process opens a cache that
is being removed. Deleting can take long, so it happens after that lock is released.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flexor.core.console import table
from flexor.core.machine import cache_folder

__all__ = [
    "CacheInfo",
    "CacheKey",
    "disk_folder",
    "list_caches",
    "make_room",
    "prune",
    "ram_folder",
    "render",
]

VERSION = 2
"""Part of the folder's name: a different file layout is a different cache."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (`ram_folder` checks whose folder it is)
RESERVE = 1 << 30
"""Bytes that caches leave free, for checkpoints and other programs; less on a small file system."""

_REMOVING = ".removing-"
_this_thread = threading.local()


@dataclass(frozen=True)
class CacheKey:
    """The content of a cache. The same key means the same cache, for every run and selection of episodes."""

    fingerprint: str  # of the dataset as published
    camera: str
    size: tuple[int, int] | None  # height and width, None: as recorded
    jpeg: int | None = None  # JPEG quality, None: raw planes
    dataset: str = field(default="", compare=False)  # its name, for messages
    features: str = ""  # a hash of what made features of the frames; empty: these are frames

    @property
    def folder_name(self) -> str:
        content = [VERSION, self.fingerprint, self.camera, self.size, self.jpeg]
        content += [self.features] if self.features else []
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]


@dataclass(frozen=True)
class CacheInfo:
    """One cache, as `flexor data cache --list` shows it. Of a broken cache only the size is known."""

    folder: Path
    in_use: bool
    nbytes: int  # on the disk, now
    last_used: float  # seconds since 1970
    dataset: str = ""
    camera: str = ""
    size: tuple[int, int] | None = None
    jpeg: int | None = None
    frames: int = 0
    ready: int = 0
    expected: int = 0  # bytes, once its users have stored everything they will store
    features: bool = False  # of the frames, not the frames themselves
    broken: bool = False

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder)}


def disk_folder() -> Path:
    return cache_folder() / "frames"


def ram_folder() -> Path | None:
    """This user's caches in shared memory; None if there is no shared memory."""
    folder = SHARED_MEMORY / f"flexor-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        # another user could have created a folder of that name, to read or change our files
        return folder if folder.lstat().st_uid == os.getuid() else None
    except OSError:
        return None


@contextmanager
def guard(folder: Path) -> Iterator[Callable[[Path], None]]:
    """A lock: only one process at a time opens, inspects or removes the caches of a folder.

    Yields `discard(cache)`, which hides a cache at once; it is deleted after the lock is released.
    """
    folder.mkdir(parents=True, exist_ok=True)
    discarded: list[Path] = []

    def discard(cache: Path) -> None:
        aside = folder / f"{_REMOVING}{cache.name}-{time.time_ns()}"
        cache.rename(aside)
        discarded.append(aside)

    try:
        with (folder / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _this_thread.guards = True
            yield discard
    finally:
        _this_thread.guards = False
        for aside in discarded:
            shutil.rmtree(aside, ignore_errors=True)


def guarding() -> bool:
    """Whether this thread is inside `guard`, and would deadlock if it entered it again."""
    return getattr(_this_thread, "guards", False)


def caches_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def in_use(cache: Path) -> bool:
    """Whether a process has the cache open. Only call it inside `guard`."""
    try:
        with (cache / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def read_header(cache: Path) -> dict[str, Any] | None:
    """The header of a cache; None if it is incomplete or unreadable."""
    try:
        header = json.loads((cache / "header.json").read_text())
    except (OSError, ValueError):
        return None
    return header if isinstance(header, dict) else None


def free_bytes(folder: Path) -> int:
    """Free bytes of the folder's file system, minus the reserve."""
    disk = os.statvfs(folder)
    reserve = min(RESERVE, disk.f_blocks * disk.f_frsize // 20)
    return max(disk.f_bavail * disk.f_frsize - reserve, 0)


def available_bytes(folder: Path) -> int:
    """Free bytes that are not reserved by caches being filled. Only call it inside `guard`."""
    reserved = sum(max(i.expected - i.nbytes, 0) for i in map(_inspect, caches_in(folder)) if i.in_use)
    return max(free_bytes(folder) - reserved, 0)


def list_caches() -> list[CacheInfo]:
    """All caches on disk and in RAM, the most recently used first."""
    infos = []
    for folder in _folders():
        with guard(folder):
            infos += [_inspect(cache) for cache in caches_in(folder)]
    return sorted(infos, key=lambda info: -info.last_used)


def prune(
    *,
    older_than: float | None = None,
    limit_bytes: int | None = None,
    dataset: str | None = None,
    everything: bool = False,
) -> list[CacheInfo]:
    """Remove caches and return them. Never removes one in use; always removes broken and incomplete ones.

    `older_than`: not used for this many seconds. `limit_bytes`: the least recently used, until the rest takes
    no more than this. `dataset` restricts both to one dataset; alone, it means all caches of that dataset.
    """
    everything |= dataset is not None and older_than is None and limit_bytes is None
    removed = []
    for folder in _folders():
        with guard(folder) as discard:
            for leftover in folder.glob(f"{_REMOVING}*"):
                discard(leftover)
            infos = sorted(map(_inspect, caches_in(folder)), key=lambda info: info.last_used)
            total = sum(info.nbytes for info in infos)
            for info in infos:
                selected = dataset in (None, info.dataset) and (
                    everything
                    or (older_than is not None and time.time() - info.last_used > older_than)
                    or (limit_bytes is not None and total > limit_bytes)
                )
                if not info.in_use and (selected or info.broken):
                    discard(info.folder)
                    removed.append(info)
                    total -= info.nbytes
    return removed


def make_room(folder: Path, sizes: Mapping[CacheKey, int], limit: int) -> bool:
    """Whether these caches (bytes of each when full) fit the folder's limit and its disk.

    Unused caches are removed to make space, the least recently used first. If that would not be enough, none
    is removed.
    """
    with guard(folder) as discard:
        names = {key.folder_name for key in sizes}
        infos = sorted(map(_inspect, caches_in(folder)), key=lambda info: info.last_used)
        requested = [info for info in infos if info.folder.name in names]
        in_use_infos = [info for info in infos if info.in_use and info not in requested]
        unused = [info for info in infos if not info.in_use and info not in requested]
        need = sum(sizes.values())
        free = free_bytes(folder) + sum(info.nbytes for info in requested)
        free -= sum(max(info.expected - info.nbytes, 0) for info in in_use_infos)
        budget = limit - sum(max(info.expected, info.nbytes) for info in in_use_infos)
        reclaimable = sum(info.nbytes for info in unused)
        if need > min(budget, free + reclaimable):
            return False
        for info in unused:
            if need <= min(budget - reclaimable, free):
                break
            discard(info.folder)
            reclaimable -= info.nbytes
            free += info.nbytes
        return True


def render(infos: list[CacheInfo]) -> str:
    """The table of `flexor data cache --list`."""
    if not infos:
        return f"no frame caches in {disk_folder()}"
    titles = ["dataset", "camera", "size", "format", "frames", "GB", "last used", "", "folder"]
    rows: list[list[object]] = [[*titles]]
    for info in infos:
        size = "x".join(map(str, info.size)) if info.size else "native"
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(info.last_used))
        state = "in use" if info.in_use else "broken" if info.broken else ""
        filled = f"{info.ready} of {info.frames}"
        form = "features" if info.features else "raw" if info.jpeg is None else "jpeg"
        cells = ["?", "?", "?", "?", "?"] if info.broken else [info.dataset, info.camera, size, form, filled]
        rows.append([*cells, f"{info.nbytes / 1e9:.3f}", when, state, info.folder])
    total = sum(info.nbytes for info in infos)
    return f"{table(rows)}\n{len(infos)} caches, {total / 1e9:.3f} GB"


def _folders() -> list[Path]:
    folders = [disk_folder(), SHARED_MEMORY / f"flexor-{os.getuid()}"]
    return [folder for folder in folders if folder.is_dir() and folder.stat().st_uid == os.getuid()]


def _inspect(cache: Path) -> CacheInfo:
    """Describe one cache. Only call it inside `guard`."""
    header, is_used = read_header(cache), in_use(cache)
    nbytes, last_used = 0, cache.stat().st_mtime
    for path in cache.iterdir():
        with suppress(FileNotFoundError):  # its users write files under a temporary name and rename them
            status = path.stat()
            nbytes += status.st_blocks * 512
            last_used = status.st_mtime if path.name == "lock" else last_used
    if header is None or header.get("version") != VERSION:  # nobody reads one of an earlier version any more
        return CacheInfo(cache, is_used, nbytes, last_used, broken=True)
    try:
        key, frames = header["key"], header["frames"]
        ready = frames - (cache / "ready").read_bytes().count(0)
        size = tuple(key["size"]) if key["size"] else None
        facts = (header["dataset"], key["camera"], size, key["jpeg"], frames, ready, header["expected"])
        features = bool(key.get("features"))
    except (OSError, KeyError, TypeError):
        return CacheInfo(cache, is_used, nbytes, last_used, broken=True)
    return CacheInfo(cache, is_used, nbytes, last_used, *facts, features)
