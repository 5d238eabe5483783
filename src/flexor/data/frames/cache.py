"""A cache of one camera's decoded frames, on disk or in RAM, shared by processes.

Each frame has a fixed place in a sparse, memory-mapped file. So reading a frame is a view, and runs on
different episodes share the frames they decoded.

Damage: each frame has a checksum, which a process compares when it first reads the frame. A damaged frame is
forgotten, and decoded again. If another process truncates a file in use, the cache is not used any more.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from flexor.core.errors import DatasetError
from flexor.core.log import log
from flexor.data.frames import cache_files
from flexor.data.frames.cache_files import CachePlan, Files, matches_plan, synced_marks, try_exclusive_lock
from flexor.data.frames.cache_folders import (
    CacheKey,
    available_bytes,
    caches_in,
    free_bytes,
    guard,
    guarding,
    in_use,
    ram_folder,
    read_header,
)
from flexor.data.frames.checksum import checksums
from flexor.data.frames.mapped_file import MappedFile

__all__ = ["FrameCache"]

LOOK_EVERY = 64 << 20
"""Bytes written between two checks of the free space."""
DTYPES = {"data": np.uint8, "ready": np.uint8, "sizes": np.uint32, "sums": np.uint64}


class CacheArrays(NamedTuple):
    """The arrays of a cache."""

    planes: np.ndarray  # [frames, stride]
    ready: np.ndarray  # [frames] whether a frame may be read
    sizes: np.ndarray | None  # [frames] bytes of each JPEG
    sums: np.ndarray | None = None  # [frames] checksums; None: no other process can change the frames


class FrameCache:
    """All frames of one camera of one dataset with one setting. Safe to use from several threads and processes.

    `planes` [frames, slot] is the mapping itself; only read rows for which `has` is true. `accepting` becomes False
    when there is no space for more frames. Frames are JPEGs if `jpeg`.
    """

    def __init__(
        self,
        arrays: CacheArrays,
        files: Files | None = None,
        maps: Mapping[str, MappedFile] = MappingProxyType({}),
    ):
        self.planes = arrays.planes
        self.jpeg = arrays.sizes is not None
        self.accepting = True
        self.folder = files.cache if files else None  # None: this process's own memory
        self.lost = False  # its files were truncated: nothing in it is used any more
        self._ready, self._sizes, self._sums = arrays.ready, arrays.sizes, arrays.sums
        self._checked = np.full(len(arrays.ready), arrays.sums is None)  # whose checksums were compared
        self._files = files
        self._maps = maps
        self._leave: weakref.finalize | None = None
        self._unlooked = LOOK_EVERY  # bytes written since the last check of free space
        self._once = threading.Lock()
        self._syncing = threading.Lock()
        self._told_damage = False

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

        It is stored in `folder`. Without a folder it is in RAM: in shared memory if there is enough of it, else in
        this process's own memory. `layout` describes the memory layout of a frame, as plain JSON data.
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
                    if not (folder / key.folder_name).exists() and plan.expected > available_bytes(folder):
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

    def has(self, ids: np.ndarray) -> np.ndarray:
        """Which frames are cached, bool [n]."""
        return np.zeros(len(ids), bool) if self.lost else self._ready[ids] != 0

    def view(self, frame: int) -> np.ndarray | None:
        """A cached frame: its planes uint8 [slot], not copied, or the bytes of its JPEG; None if it is damaged.

        Call `intact` after the last use of a view: until then, a truncated file may turn it into zeros.
        """
        if self.lost or not self._ready[frame]:
            return None  # another thread has found it damaged
        content = self.planes[frame]
        if self._sizes is not None:
            content = content[: self._sizes[frame]].copy()
        if not self._checked[frame] and not self._compare(content[None], np.array([frame])).all():
            return None
        return content if self._sizes is None or self.intact() else None

    def gather(self, ids: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy cached frames to `out`, uint8 [n, slot]; only if they are not JPEGs. Releases the GIL.

        Returns which frames are good, bool [n]. The others are damaged, or their file was truncated.
        """
        assert not self.jpeg
        np.take(self.planes, ids, axis=0, out=out, mode="clip")  # any other mode copies twice
        good = self._ready[ids] != 0
        if not self._checked[ids].all():
            good &= self._compare(out, ids)
        return good if self.intact() else np.zeros(len(ids), bool)

    def _compare(self, contents: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Whether frames [n, size] have their checksums. bool [n]"""
        assert self._sums is not None
        sound = checksums(contents, ids) == self._sums[ids]
        self._checked[ids[sound]] = True
        if not sound.all() and self.intact():
            self._forget(ids[~sound])
        return sound

    def intact(self) -> bool:
        """Whether what was read so far was in the files. If not, the cache is not used any more."""
        if self.lost or not self._maps:
            return not self.lost
        if self._maps["data"].complete and not any(each.lost for each in self._maps.values()):
            return True
        with self._once:
            if not self.lost:
                self.lost, self.accepting = True, False
                log.warning(
                    "the frame cache %s was truncated by another program: its frames are decoded again, and no more "
                    "are cached in this run",
                    self.folder,
                )
        return False

    def _forget(self, ids: np.ndarray) -> None:
        """Damaged frames are not cached any more, for all processes."""
        with self._once:
            told, self._told_damage = self._told_damage, True
        if not told:
            log.warning(
                "the frame cache %s has damaged frames, such as frame %d: they are decoded again",
                self.folder,
                ids[0],
            )
        files = self._files
        if files is None:
            ready = self._ready.copy()  # of a mapping that can't be written to
            ready[ids] = 0
            self._ready = ready
            return
        with suppress(OSError):
            for frame in ids.tolist():
                files.write("ready", frame, b"\0")

    def put(self, ids: np.ndarray, frames: np.ndarray | Sequence[bytes]) -> None:
        """Cache frames: planes uint8 [n, slot], or n JPEGs. If there is no space left, they are not cached."""
        for frame, content in zip(ids.tolist(), frames):
            size = len(content)
            assert self._sizes is not None or size == self.planes.shape[1]
            if self._ready[frame] or size > self.planes.shape[1]:
                continue  # a JPEG larger than its slot is not cached, so its frame is decoded at every read
            files = self._files  # a reference: the descriptors stay open after a close() by another thread
            # a write to a file that was truncated would fill it up with zeros
            if not self.accepting or not self.intact():
                return
            if files is None:
                self._write_to_memory(frame, content)
                continue
            try:
                self._look_at_room(files, size)
                self._write_to_files(files, frame, np.frombuffer(content, np.uint8))
            except OSError as error:
                self._stop(error, files)

    def _write_to_files(self, files: Files, frame: int, content: np.ndarray) -> None:
        files.write("data", frame * self.planes.shape[1], content)
        if self._sizes is not None:
            files.write("sizes", 4 * frame, np.uint32(len(content)).tobytes())
        files.write("sums", 8 * frame, checksums(content[None], np.array([frame])).tobytes())
        files.write("ready", frame, b"\1")  # last: from now on the frame may be read
        self._checked[frame] = True

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
        self.accepting = False
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
            if not self.accepting:
                return
            self.accepting = False
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
    return FrameCache(CacheArrays(planes, np.zeros(plan.frames, np.uint8), sizes))


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
        if try_exclusive_lock(lock):
            cache_files.repair_files(cache, plan)
        header = read_header(cache)
        if header is None or not matches_plan(cache, header, plan):
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
    maps = {name: MappedFile(cache / name, dtype) for name, dtype in DTYPES.items() if name in plan.files()}
    arrays = CacheArrays(
        maps["data"].array.reshape(plan.frames, plan.stride),
        maps["ready"].array,
        maps["sizes"].array if "sizes" in maps else None,
        maps["sums"].array,
    )
    if header["boot"] == cache_files.boot_id():
        return FrameCache(arrays, Files(cache, plan.files(), lasting), maps)
    # In use by another machine through a network file system: its writes may become visible here in any order.
    log.warning("%s is being filled by another machine: this run reads it, but adds no frames to it", cache)
    ready = np.frombuffer(synced_marks(cache, plan.frames), np.uint8)
    opened = FrameCache(arrays._replace(ready=ready), None, maps)
    opened.accepting, opened.folder = False, cache
    return opened


def _leave(cache: Path, lock: int, in_ram: bool, owner: int) -> None:
    """Called by close(), when the cache is garbage-collected, or at the end of the process."""
    if os.getpid() != owner:
        return  # a forked process: the lock belongs to its parent
    # Garbage collection may run anywhere, also inside `guard`. The next process that opens a cache cleans up.
    if in_ram and not guarding():
        with suppress(OSError), guard(cache.parent) as discard:
            if try_exclusive_lock(lock):
                discard(cache)
    with suppress(OSError):
        os.utime(lock)
    os.close(lock)
