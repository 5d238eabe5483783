"""Frames kept after their first decoding: all of one camera, on disk or in RAM, shared by processes.

A frame has a fixed place in a sparse file that is mapped into memory, so that reading one is a view, and
runs over different episodes share what they decoded.

What is trusted. A frame is marked after its bytes are in the file, so a process killed at any instant
leaves only whole frames marked. A machine that lost power may have written marks to the disk before
the frames they stand for. So marks count within the same boot only; later only those do that `sync` set
down after everything before them was on the disk. Two processes that write the same frame write the
same bytes.
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
from flexor.data.frames.cache_files import Files, Plan, is_sound, synced_marks, try_alone
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
"""Bytes written between two looks at how much room is left."""


class FrameCache:
    """All frames of one camera of one dataset at one setting. Safe from many threads and many processes.

    `planes` [frames, slot] is the mapping itself, for gathering many raw frames at once; only rows that
    `have` says are there may be read. `keeping` turns False when there is no room for more. Frames are
    JPEGs if `jpeg`.
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
        self._unlooked = LOOK_EVERY  # bytes written since the last look at the room; the first frame looks
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
        """The cache of `frames` frames of `slot` bytes each (JPEG: what they would take raw).

        It lies in `folder`; without one, in RAM: shared with other processes if shared memory has room,
        else in this process's own. `layout` says how a frame lies in its bytes, as plain JSON data;
        `expected` how many bytes will be put, if not all frames or smaller ones.
        """
        assert frames > 0 and slot > 0
        plan = Plan(key, frames, slot, layout, frames * slot if expected is None else expected)
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
                f"frames cannot be kept in {folder}: {error}. Set FLEXOR_CACHE to a folder on a local disk "
                f"that has room, or keep no frames"
            ) from error

    @property
    def count(self) -> int:
        """How many frames are there."""
        return int(np.count_nonzero(self._ready))

    @property
    def complete(self) -> bool:
        return self.count == len(self._ready)

    def have(self, ids: np.ndarray) -> np.ndarray:
        """Which frames are there, bool [n]."""
        return self._ready[ids] != 0

    def view(self, frame: int) -> np.ndarray:
        """A frame that is there: its planes uint8 [slot], or the bytes of its JPEG; not copied."""
        assert self._ready[frame], f"frame {frame} is not in the cache"
        return self.planes[frame] if self._sizes is None else self.planes[frame, : self._sizes[frame]]

    def put(self, ids: np.ndarray, frames: np.ndarray | Sequence[bytes]) -> None:
        """Keep frames: planes uint8 [n, slot], or n JPEGs. Where there is no room left, it keeps no more."""
        for frame, content in zip(ids.tolist(), frames):
            size = len(content)
            assert self._sizes is not None or size == self.planes.shape[1]
            if self._ready[frame] or size > self.planes.shape[1]:
                continue  # a JPEG that is larger than its place is decoded again whenever it is read
            files = self._files  # held, so that the descriptors outlive a close() by another thread
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
                files.write("ready", frame, b"\1")  # last: whoever sees it may read the frame
            except OSError as error:
                self._stop(error, files)

    def sync(self) -> None:
        """Bring all to the disk, so that it outlives a loss of power. May take long; nothing to do in RAM."""
        files = self._files
        if files is None or not files.lasting:
            return
        with self._syncing:
            ready = self._ready.tobytes()  # before the rest: what is marked meanwhile may not be on the disk
            if ready == synced_marks(files.cache, len(ready)):
                return
            try:
                for descriptor in files.descriptors.values():
                    os.fsync(descriptor)
                cache_files.replace(files.cache / "synced", ready)
            except OSError as error:
                self._stop(error, files)

    def close(self) -> None:
        """Sync and leave; views stay valid. From RAM, the last one to leave takes the frames away."""
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
        """Keep no more frames from now on; what is there stays."""
        with self._once:
            if not self.keeping:
                return
            self.keeping = False
        log.warning(
            "%s: %s. %d of %d frames are kept there, the others are decoded whenever they are read",
            files.cache,
            error.strerror,
            self.count,
            len(self._ready),
        )


def _in_own_memory(plan: Plan) -> FrameCache:
    """Nobody to share with: pages come as they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, plan.frames * plan.stride, flags=flags)
    if plan.key.jpeg is not None and hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # the holes between frames are smaller than huge pages
    planes = np.frombuffer(memory, np.uint8).reshape(plan.frames, plan.stride)
    sizes = None if plan.key.jpeg is None else np.zeros(plan.frames, np.uint32)
    return FrameCache(planes, np.zeros(plan.frames, np.uint8), sizes)


def _sweep(folder: Path, key: CacheKey, discard: Callable[[Path], None]) -> None:
    """Free the memory that killed runs left behind, but for what is wanted again now."""
    for cache in caches_in(folder):
        if cache.name != key.folder_name and not in_use(cache):
            discard(cache)


def _open_files(cache: Path, plan: Plan, in_ram: bool) -> FrameCache:
    """Inside of `guard`: nobody else opens or removes it meanwhile."""
    cache.mkdir(exist_ok=True)
    lock = os.open(cache / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if try_alone(lock):
            cache_files.put_in_order(cache, plan)
        header = read_header(cache)
        if header is None or not is_sound(cache, header, plan):
            raise DatasetError(
                f"the frame cache {cache} is damaged, and another process uses it. End that process: the "
                f"cache is made anew as soon as nobody uses it"
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


def _map(cache: Path, plan: Plan, header: dict[str, Any], lasting: bool) -> FrameCache:
    planes = _mapped(cache / "data", np.uint8).reshape(plan.frames, plan.stride)
    sizes = None if plan.key.jpeg is None else _mapped(cache / "sizes", np.uint32)
    if header["boot"] == cache_files.boot_id():
        files = Files(cache, plan.files(), lasting)
        return FrameCache(planes, _mapped(cache / "ready", np.uint8), sizes, files)
    # In use on another machine, through a network file system: what it writes now comes here in any order.
    log.warning("%s is being filled by another machine: read, but not added to", cache)
    opened = FrameCache(planes, np.frombuffer(synced_marks(cache, plan.frames), np.uint8), sizes)
    opened.keeping = False
    return opened


def _mapped(path: Path, dtype: type) -> np.ndarray:
    """A file as an array that cannot be written to."""
    return np.memmap(path, dtype, mode="r").view(np.ndarray)


def _leave(cache: Path, lock: int, in_ram: bool, owner: int) -> None:
    """Called by close(), or when the cache is garbage, or at the end of the process."""
    if os.getpid() != owner:
        return  # a fork: the lock is its parent's
    # Garbage may be collected anywhere, inside of `guard` too. The next one to open sweeps what is left.
    if in_ram and not guarding():
        with suppress(OSError), guard(cache.parent) as discard:
            if try_alone(lock):
                discard(cache)
    with suppress(OSError):
        os.utime(lock)
    os.close(lock)
