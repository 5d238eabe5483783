"""Caches blocks of remote files on the local disk, so that a second epoch does not download them again.

A cache may lose data at any time, so nothing here raises an error: a block that can't be written is not cached,
and a block of the wrong length is not used. Processes share a folder without communication: blocks are written
under a temporary name and renamed, and a process that finds the folder too large removes the oldest blocks.
"""

import hashlib
import os
import shutil
import threading
from collections import OrderedDict
from pathlib import Path

from flexor.core.log import log
from flexor.core.machine import cache_folder
from flexor.core.output_paths import replacing

__all__ = ["BLOCK", "BlockCache", "block_cache"]

BLOCK = 1 << 20
"""Bytes of a block."""
MEMORY_BLOCKS = 64
"""Blocks cached in memory if the disk can't be used."""


class BlockCache:
    """The most recently used blocks, within `limit` bytes of disk (not counting file-system overhead)."""

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit
        self._lock = threading.Lock()
        self._memory: OrderedDict[Path, bytes] = OrderedDict()
        self._disk_is_full = limit < BLOCK
        # Bytes in the folder at the last check, plus those written since; unknown until the first write.
        self._used: int | None = None
        self._since_scan = 0

    def has(self, identity: str, number: int) -> bool:
        path = self._path(identity, number)
        return path in self._memory or path.is_file()

    def get(
        self, identity: str, number: int, size: int, begin: int = 0, end: int | None = None
    ) -> bytes | None:
        """Bytes begin to end of a block, by default all; None if it is not cached with the right size."""
        path = self._path(identity, number)
        end = size if end is None else end
        data = self._memory.get(path)
        if data is not None:
            return data[begin:end] if len(data) == size else None
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:
            return None
        try:
            if os.fstat(file).st_size != size:
                return None
            os.utime(path)  # mark as used: removed last
            return os.pread(file, end - begin, begin)
        except OSError:
            return None
        finally:
            os.close(file)

    def put(self, identity: str, number: int, data: bytes) -> None:
        path = self._path(identity, number)
        if not self._disk_is_full:
            try:
                self._write(path, data)
            except OSError as error:
                self._give_up_disk(error)
        if self._disk_is_full:
            with self._lock:
                self._memory[path] = data
                while len(self._memory) > MEMORY_BLOCKS:
                    self._memory.popitem(last=False)

    def _path(self, identity: str, number: int) -> Path:
        key = hashlib.sha256(identity.encode()).hexdigest()[:32]
        return self.folder / key[:2] / f"{key}-{number}"

    def _write(self, path: Path, data: bytes) -> None:
        self._make_room(len(data))
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as aside:
            aside.write_bytes(data)

    def _give_up_disk(self, error: OSError) -> None:
        with self._lock:
            if self._disk_is_full:
                return
            self._disk_is_full = True
        log.warning(
            "%s can't be written (%s): streamed data is not cached from now on. Free some space, or "
            "set $FLEXOR_CACHE to a folder on another disk",
            self.folder,
            error,
        )

    def _make_room(self, count: int) -> None:
        """Count written bytes; if the folder may be full, check it and remove the oldest blocks."""
        with self._lock:
            was_counted = self._used is not None
            self._used = (self._used or 0) + count
            self._since_scan += count
            # Other processes write too: check again from time to time, even if our count says there is space.
            counted = was_counted and self._since_scan <= max(self.limit // 16, 64 * BLOCK)
            if counted and self._used <= self.limit:
                return
            self._since_scan = count
            self._used = count + self._remove_oldest(self.limit - count)

    def _remove_oldest(self, limit: int) -> int:
        """Remove the oldest blocks if the folder exceeds `limit`, and a tenth more. Returns its size in bytes."""
        paths = [entry for folder in _entries(self.folder) for entry in _entries(folder)]
        sized = sorted(
            (status.st_mtime, status.st_size, path) for path, status in map(_status, paths) if status
        )
        used = sum(size for _, size, _ in sized)
        if used <= limit:
            return used
        for _, size, path in sized:
            if used <= limit * 0.9:
                break
            Path(path).unlink(missing_ok=True)
            used -= size
        return used


def block_cache(limit: int | None) -> BlockCache:
    """The block cache in the cache folder; default limit: a quarter of the free disk space."""
    folder = cache_folder() / "blocks"
    if limit is None:
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        limit = shutil.disk_usage(existing).free // 4
    return BlockCache(folder, limit)


def _entries(folder: Path | os.DirEntry[str]) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except OSError:
        return []


def _status(entry: os.DirEntry[str]) -> tuple[str, os.stat_result | None]:
    try:
        return entry.path, entry.stat()
    except OSError:
        return entry.path, None  # removed by another process in the meantime
