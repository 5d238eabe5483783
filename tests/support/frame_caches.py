"""Frame caches of small frames whose content follows from their number; processes that fill them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from flexor.data.frames import cache_folders as caches
from flexor.data.frames.cache import FrameCache
from flexor.data.frames.cache_folders import CacheKey
from support.limits import LIMIT_S
from support.runs import SERVER

KEY = CacheKey("f1", "observation.images.top", None, None, "me/blocks")
LAYOUT = {"height": 4, "width": 6, "layout": "yuv420p"}
SLOT = 36


def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A test keeps its caches to itself. Gives the folder of those on disk."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(caches, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setenv("FLEXOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "frames"


def planes(ids, slot: int = SLOT) -> np.ndarray:
    """What the decoder would give: each frame's bytes follow from its id. [n, slot]"""
    ids = np.asarray(ids, np.int64)[:, None]
    return (ids % 241 + 7).astype(np.uint8) * (np.arange(slot) % 253 + 1).astype(np.uint8)


def jpeg(frame: int) -> bytes:
    """Stands for a JPEG: some are larger than the raw planes."""
    return planes([frame], 1 + frame * 13 % (3 * SLOT))[0].tobytes()


def open_cache(folder: Path | None, key: CacheKey = KEY, frames: int = 20, slot: int = SLOT) -> FrameCache:
    return FrameCache.open(folder, key, frames, slot, LAYOUT)


def filled(folder: Path | None, key: CacheKey = KEY, frames: int = 20, slot: int = SLOT) -> FrameCache:
    cache = open_cache(folder, key, frames, slot)
    cache.put(np.arange(frames), planes(np.arange(frames), slot))
    return cache


def check(cache: FrameCache) -> int:
    """Every frame that is marked is whole; gives how many there are."""
    ids = np.flatnonzero(cache.has(np.arange(len(cache.planes))))
    assert (cache.planes[ids] == planes(ids, cache.planes.shape[1])).all()
    return len(ids)


def fill_forever(folder: Path | None, frames: int, slot: int, shared_memory: Path, ready, go) -> None:
    caches.SHARED_MEMORY = shared_memory
    content = planes(range(frames), slot)
    ready.set()
    go.wait()
    cache = FrameCache.open(folder, KEY, frames, slot, LAYOUT)
    while True:
        for frame in np.random.default_rng().permutation(frames).tolist():
            cache.put(np.array([frame]), content[frame : frame + 1])
            if frame % 16 == 0:
                cache.sync()
                ready.set()


@contextmanager
def filling(folder: Path | None, tmp_path: Path, frames: int, slot: int, wait: bool) -> Iterator[None]:
    """Another process fills the cache meanwhile, and is killed at the end; `wait` until it has a frame."""
    ready, go = SERVER.Event(), SERVER.Event()
    other = SERVER.Process(target=fill_forever, args=(folder, frames, slot, tmp_path / "shm", ready, go))
    other.start()
    assert ready.wait(LIMIT_S)
    ready.clear()
    go.set()
    try:
        assert not wait or ready.wait(LIMIT_S)
        yield
    finally:
        other.kill()
        other.join()
