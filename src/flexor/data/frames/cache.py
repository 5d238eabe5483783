"""A cache of one camera's decoded frames, on disk or in RAM, shared by processes.

Each frame has a fixed place in a sparse, memory-mapped file. So reading a frame is a view, and runs on
different episodes share the frames they decoded.

Crash safety: a frame is marked as ready after its bytes are in the file, so a process killed at any time
leaves only complete frames marked. After a power failure, marks may be on the disk without their frames.
So marks are trusted only within the same boot. After a reboot, only the marks that `sync` wrote are
trusted: it writes them after all earlier frames are on the disk. Two processes that write the same frame
write the same bytes.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from flexor.core.errors import DatasetError
from flexor.core.log import log
from flexor.data.frames import cache_files
from flexor.data.frames.cache_files import CachePlan, Files, is_sound, synced_marks, try_alone
from flexor.data.frames.cache_folders import (
    CacheKey,
    caches_in,
    free_bytes,
    guard,
    guarding,
    in_use,
    ram_folder,
    read_header,
    room,
)

__all__ = ["FrameCache"]

LOOK_EVERY = 64 << 20
"""Bytes written between two checks of the free space."""


class FrameCache:
    """All frames of one camera of one dataset with one setting. Safe to use from several threads and processes.

    `planes` [frames, slot] is the mapping itself, to gather many raw frames at once; only read rows for which
    `have` is true. `keeping` becomes False when there is no space for more frames. Frames are JPEGs if `jpeg`.
    """

    def __init__(
        self,
        planes: np.ndarray,
        ready: np.ndarray,
        sizes: np.ndarray | None,
        files: Files | None = None,
    ):
        self.planes = planes
        self.jpeg = sizes is not None
        self.keeping = True
        self.folder = files.cache if files else None  # None: this process's own memory
        self._ready = ready
        self._sizes = sizes
        self._files = files
        self._leave: weakref.finalize | None = None
        self._unlooked = (
            LOOK_EVERY  # bytes written since the last check of free space; the first frame triggers a check
        )
        self._once = threading.Lock()
        self._syncing = threading.Lock()

    @classmethod
    def open(
        cls,
        folder: Path | None,
        key: CacheKey,
        frames: int,
        slot: int,
        layout: dict[str, Any],
        expected: int | None = None,
    ) -> FrameCache:
        """The cache of `frames` frames of `slot` bytes each (for JPEG: their raw size).

        It is stored in `folder`. Without a folder it is in RAM: in shared memory if that has enough room, else
        in this process's own memory. `layout` describes the memory layout of a frame, as plain JSON data.
        `expected` is how many bytes will be stored, if less than all frames at full size.
        """
        assert frames > 0 and slot > 0
        plan = CachePlan(key, frames, slot, layout, frames * slot if expected is None else expected)
        in_ram = folder is None
        folder = folder or ram_folder()
        if folder is None:
            return _in_own_memory(plan)
        try:
            with guard(folder) as discard:
                if in_ram:
                    _sweep(folder, key, discard)
                    if not (folder / key.folder_name).exists() and plan.expected > room(folder):
                        return _in_own_memory(plan)
                return _open_files(folder / key.folder_name, plan, in_ram)
        except OSError as error:
            raise DatasetError(
                f"frames can't be cached in {folder}: {error}. Set FLEXOR_CACHE to a folder on a local disk "
                f"with enough free space, or train without a frame cache (--dataset.cache.tier=stream)"
            ) from error

    @property
    def count(self) -> int:
        """Number of cached frames."""
        return int(np.count_nonzero(self._ready))

    @property
    def complete(self) -> bool:
        return self.count == len(self._ready)

    def have(self, ids: np.ndarray) -> np.ndarray:
        """Which frames are cached, bool [n]."""
        return self._ready[ids] != 0

    def view(self, frame: int) -> np.ndarray:
        """A cached frame: its planes uint8 [slot], or the bytes of its JPEG; not copied."""
        assert self._ready[frame], f"frame {frame} is not in the cache"
        return self.planes[frame] if self._sizes is None else self.planes[frame, : self._sizes[frame]]

    def gather(self, ids: np.ndarray, out: np.ndarray) -> None:
        """Copy cached frames to `out`, uint8 [n, slot]; only if they are not JPEGs. Releases the GIL."""
        assert not self.jpeg and self._ready[ids].all()
        np.take(self.planes, ids, axis=0, out=out, mode="clip")  # any other mode copies twice

    def put(self, ids: np.ndarray, frames: np.ndarray | Sequence[bytes]) -> None:
        """Cache frames: planes uint8 [n, slot], or n JPEGs. If there is no space left, they are not cached."""
        for frame, content in zip(ids.tolist(), frames):
            size = len(content)
            assert self._sizes is not None or size == self.planes.shape[1]
            if self._ready[frame] or size > self.planes.shape[1]:
                continue  # a JPEG larger than its slot is not cached, so its frame is decoded at every read
            files = (
                self._files
            )  # a reference, so that the descriptors stay open after a close() by another thread
            if not self.keeping:
                return
            if files is None:
                self._write_to_memory(frame, content)
                continue
            try:
                self._look_at_room(files, size)
                files.write("data", frame * self.planes.shape[1], content)
                if self._sizes is not None:
                    files.write("sizes", 4 * frame, np.uint32(size).tobytes())
                files.write("ready", frame, b"\1")  # last: from now on the frame may be read
            except OSError as error:
                self._stop(error, files)

    def sync(self) -> None:
        """Flush everything to disk so that it survives a power failure. May take long; does nothing in RAM."""
        files = self._files
        if files is None or not files.lasting:
            return
        with self._syncing:
            ready = self._ready.tobytes()  # read first: frames marked during the sync may not be on the disk
            if ready == synced_marks(files.cache, len(ready)):
                return
            try:
                for descriptor in files.descriptors.values():
                    os.fsync(descriptor)
                cache_files.replace(files.cache / "synced", ready)
            except OSError as error:
                self._stop(error, files)

    def close(self) -> None:
        """Sync and close; views stay valid. The last process that closes a cache in RAM deletes its frames."""
        self.sync()
        self.keeping = False
        self._files = None
        if self._leave is not None:
            self._leave()

    def _write_to_memory(self, frame: int, content: np.ndarray | bytes) -> None:
        self.planes[frame, : len(content)] = np.frombuffer(content, np.uint8)
        if self._sizes is not None:
            self._sizes[frame] = len(content)
        self._ready[frame] = 1

    def _look_at_room(self, files: Files, size: int) -> None:
        self._unlooked += size
        if self._unlooked >= LOOK_EVERY:
            self._unlooked = 0
            if free_bytes(files.cache) == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _stop(self, error: OSError, files: Files) -> None:
        """Stop caching new frames; cached frames stay."""
        with self._once:
            if not self.keeping:
                return
            self.keeping = False
        log.warning(
            "%s: %s. %d of %d frames are cached there; the others are decoded at every read",
            files.cache,
            error.strerror,
            self.count,
            len(self._ready),
        )


def _in_own_memory(plan: CachePlan) -> FrameCache:
    """A cache in this process's own memory; pages are allocated when they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, plan.frames * plan.stride, flags=flags)
    if plan.key.jpeg is not None and hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # the gaps between frames are smaller than huge pages
    planes = np.frombuffer(memory, np.uint8).reshape(plan.frames, plan.stride)
    sizes = None if plan.key.jpeg is None else np.zeros(plan.frames, np.uint32)
    return FrameCache(planes, np.zeros(plan.frames, np.uint8), sizes)


def _sweep(folder: Path, key: CacheKey, discard: Callable[[Path], None]) -> None:
    """Free the memory that killed runs left behind, except for the cache that is being opened."""
    for cache in caches_in(folder):
        if cache.name != key.folder_name and not in_use(cache):
            discard(cache)


def _open_files(cache: Path, plan: CachePlan, in_ram: bool) -> FrameCache:
    """Call inside `guard`: no other process opens or removes the cache at the same time."""
    cache.mkdir(exist_ok=True)
    lock = os.open(cache / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if try_alone(lock):
            cache_files.put_in_order(cache, plan)
        header = read_header(cache)
        if header is None or not is_sound(cache, header, plan):
            raise DatasetError(
                f"the frame cache {cache} is damaged, and another process is using it. Stop that process: Flexor "
                f"recreates the cache once no process uses it"
            )
        if plan.expected > header["expected"]:
            cache_files.write_header(cache, plan, header["boot"])
        fcntl.flock(lock, fcntl.LOCK_SH)
        os.utime(lock)
        opened = _map(cache, plan, header, lasting=not in_ram)
    except BaseException:
        os.close(lock)
        raise
    opened._leave = weakref.finalize(opened, _leave, cache, lock, in_ram, os.getpid())
    return opened


def _map(cache: Path, plan: CachePlan, header: dict[str, Any], lasting: bool) -> FrameCache:
    planes = _mapped(cache / "data", np.uint8).reshape(plan.frames, plan.stride)
    sizes = None if plan.key.jpeg is None else _mapped(cache / "sizes", np.uint32)
    if header["boot"] == cache_files.boot_id():
        files = Files(cache, plan.files(), lasting)
        return FrameCache(planes, _mapped(cache / "ready", np.uint8), sizes, files)
    # In use by another machine through a network file system: its writes may become visible here in any order.
    log.warning("%s is being filled by another machine: this run reads it, but adds no frames to it", cache)
    opened = FrameCache(planes, np.frombuffer(synced_marks(cache, plan.frames), np.uint8), sizes)
    opened.keeping = False
    return opened


def _mapped(path: Path, dtype: type) -> np.ndarray:
    """A file as a read-only array."""
    return np.memmap(path, dtype, mode="r").view(np.ndarray)


def _leave(cache: Path, lock: int, in_ram: bool, owner: int) -> None:
    """Called by close(), when the cache is garbage-collected, or at the end of the process."""
    if os.getpid() != owner:
        return  # a forked process: the lock belongs to its parent
    # Garbage collection may run anywhere, also inside `guard`. The next process that opens a cache cleans up.
    if in_ram and not guarding():
        with suppress(OSError), guard(cache.parent) as discard:
            if try_alone(lock):
                discard(cache)
    with suppress(OSError):
        os.utime(lock)
    os.close(lock)
