"""Frames kept after their first decoding: all of one camera, on disk or in RAM, shared by processes.

A frame has a fixed place in a sparse file that is mapped into memory, so that reading one is a view, and
runs over different episodes share what they decoded. All is written with `pwrite` and not through the
mapping: a full disk is then an error that can be handled, where a page fault would kill the process.

What is trusted. A frame is marked after its bytes are in the file, so a process killed at any instant
leaves only whole frames marked. A machine that lost power may have written marks to the disk before
the frames they stand for. So marks count within the same boot only; later only those do that `sync` set
down after everything before them was on the disk. Two processes that write the same frame write the
same bytes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flexor.data.caches import (
    CacheKey,
    caches_in,
    free_bytes,
    full_bytes,
    guard,
    guarding,
    in_use,
    ram_folder,
    read_header,
    room,
)
from flexor.errors import DatasetError
from flexor.log import log

__all__ = ["FrameCache"]

PAGE = 4096
LOOK_EVERY = 64 << 20
"""Bytes written between two looks at how much room is left."""


@dataclass(frozen=True)
class _Plan:
    """What is to be opened."""

    key: CacheKey
    frames: int
    slot: int
    layout: dict[str, Any]

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

    def header(self) -> dict[str, Any]:
        key = self.key
        size = list(key.size) if key.size else None
        return {
            "key": {"fingerprint": key.fingerprint, "camera": key.camera, "size": size, "jpeg": key.jpeg},
            "frames": self.frames,
            "slot": self.slot,
            "layout": json.loads(json.dumps(self.layout)),
        }


class FrameCache:
    """All frames of one camera of one dataset at one setting. Safe from many threads and many processes.

    `planes` [frames, slot] is the mapping itself, for gathering many raw frames at once; only rows that
    `have` says are there may be read. `keeping` turns False when there is no room for more.
    """

    def __init__(
        self,
        planes: np.ndarray,
        ready: np.ndarray,
        sizes: np.ndarray | None,
        files: _Files | None = None,
    ):
        self.planes = planes
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
        cls, folder: Path | None, key: CacheKey, frames: int, slot: int, layout: dict[str, Any]
    ) -> FrameCache:
        """The cache of `frames` frames of `slot` bytes each (JPEG: what they would take raw).

        It lies in `folder`; without one, in RAM: shared with other processes if shared memory has room,
        else in this process's own. `layout` says how a frame lies in its bytes, as plain JSON data.
        """
        assert frames > 0 and slot > 0
        plan = _Plan(key, frames, slot, layout)
        in_ram = folder is None
        folder = folder or ram_folder()
        if folder is None:
            return _in_own_memory(plan)
        try:
            with guard(folder) as discard:
                if in_ram:
                    _sweep(folder, key, discard)
                    there = (folder / key.folder_name).exists()
                    if not there and full_bytes(frames, slot, key.jpeg) > room(folder):
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
                continue
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
            if ready == _synced(files.cache, len(ready)):
                return
            try:
                for descriptor in files.descriptors.values():
                    os.fsync(descriptor)
                _replace(files.cache / "synced", ready)
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

    def _look_at_room(self, files: _Files, size: int) -> None:
        self._unlooked += size
        if self._unlooked >= LOOK_EVERY:
            self._unlooked = 0
            if free_bytes(files.cache) == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _stop(self, error: OSError, files: _Files) -> None:
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


class _Files:
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


def _in_own_memory(plan: _Plan) -> FrameCache:
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


def _open_files(cache: Path, plan: _Plan, in_ram: bool) -> FrameCache:
    """Inside of `guard`: nobody else opens or removes it meanwhile."""
    cache.mkdir(exist_ok=True)
    lock = os.open(cache / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if _try_alone(lock):
            _put_in_order(cache, plan)
        header = read_header(cache)
        if header is None or not _sound(cache, header, plan):
            raise DatasetError(
                f"the frame cache {cache} is damaged, and another process uses it. End that process: the "
                f"cache is made anew as soon as nobody uses it"
            )
        fcntl.flock(lock, fcntl.LOCK_SH)
        os.utime(lock)
        opened = _map(cache, plan, header, lasting=not in_ram)
    except BaseException:
        os.close(lock)
        raise
    opened._leave = weakref.finalize(opened, _leave, cache, lock, in_ram, os.getpid())
    return opened


def _try_alone(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _put_in_order(cache: Path, plan: _Plan) -> None:
    """The only user makes anew what is not sound, and drops marks that a crash may have made lies."""
    header, boot = read_header(cache), boot_id()
    if header is None or not _sound(cache, header, plan):
        for path in cache.iterdir():
            if path.name != "lock":
                path.unlink()
        _fsync(cache)  # no old mark may come back and stand for a new frame
        for name, length in plan.files().items():
            with (cache / name).open("wb") as file:
                if name == "data":
                    file.truncate(length)
                else:
                    file.write(bytes(length))  # read all over: a hole would need a page when there is none
    elif header["boot"] != boot or not boot:
        _replace(cache / "ready", _synced(cache, plan.frames))
    else:
        return
    header = {**plan.header(), "dataset": plan.key.dataset, "boot": boot}
    _replace(cache / "header.json", json.dumps(header).encode())


def _sound(cache: Path, header: dict[str, Any], plan: _Plan) -> bool:
    """Whether the header is what it should be and the files are as long as they should be."""
    fits = "boot" in header and all(header.get(name) == value for name, value in plan.header().items())
    try:
        return fits and all((cache / n).stat().st_size == length for n, length in plan.files().items())
    except OSError:
        return False


def _map(cache: Path, plan: _Plan, header: dict[str, Any], lasting: bool) -> FrameCache:
    planes = _mapped(cache / "data", np.uint8).reshape(plan.frames, plan.stride)
    sizes = None if plan.key.jpeg is None else _mapped(cache / "sizes", np.uint32)
    if header["boot"] == boot_id():
        files = _Files(cache, plan.files(), lasting)
        return FrameCache(planes, _mapped(cache / "ready", np.uint8), sizes, files)
    # In use on another machine, through a network file system: what it writes now comes here in any order.
    log.warning("%s is being filled by another machine: read, but not added to", cache)
    opened = FrameCache(planes, np.frombuffer(_synced(cache, plan.frames), np.uint8), sizes)
    opened.keeping = False
    return opened


def _mapped(path: Path, dtype: type) -> np.ndarray:
    """A file as an array that cannot be written to."""
    return np.memmap(path, dtype, mode="r").view(np.ndarray)


def _synced(cache: Path, frames: int) -> bytes:
    """The marks that outlive a crash of the machine."""
    try:
        marks = (cache / "synced").read_bytes()
    except FileNotFoundError:
        return bytes(frames)
    return marks if len(marks) == frames else bytes(frames)


def _leave(cache: Path, lock: int, in_ram: bool, owner: int) -> None:
    """Called by close(), or when the cache is garbage, or at the end of the process."""
    if os.getpid() != owner:
        return  # a fork: the lock is its parent's
    # Garbage may be collected anywhere, inside of `guard` too. The next one to open sweeps what is left.
    if in_ram and not guarding():
        with suppress(OSError), guard(cache.parent) as discard:
            if _try_alone(lock):
                discard(cache)
    with suppress(OSError):
        os.utime(lock)
    os.close(lock)


def boot_id() -> str:
    """Changes whenever this machine starts; empty where that cannot be known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _replace(path: Path, content: bytes) -> None:
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


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
