"""Frame caches where there is little room: a full disk, a folder that can't be, memory that is shared."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flexor.core.errors import DatasetError
from flexor.data.frames import cache as cache_module
from flexor.data.frames import cache_folders as caches
from flexor.data.frames.cache import FrameCache
from flexor.data.frames.cache_folders import CacheKey, list_caches
from support import disks
from support.frame_caches import (
    KEY,
    LAYOUT,
    SLOT,
    check,
    filled,
    filling,
    open_cache,
    own_folders,
    planes,
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    return own_folders(tmp_path, monkeypatch)


# a full disk


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    with disks.small_disk(tmp_path / "small", 8) as disk:
        yield disk


def test_full_disk(small_disk, log_lines):
    cache = filled(small_disk, frames=100, slot=200_000)
    stored = check(cache)
    assert 35 <= stored <= 41 and not cache.accepting
    assert len(log_lines) == 1 and "No space left" in log_lines[0]
    cache.put(np.arange(100), planes(range(100), 200_000))
    assert check(cache) == stored and len(log_lines) == 1
    cache.close()
    again = filled(small_disk, frames=100, slot=200_000)  # readable, though nothing can be added
    assert check(again) == stored
    with pytest.raises(DatasetError, match="No space left"):
        open_cache(small_disk, CacheKey("f1", "wrist", None), frames=1_000_000)


def test_a_cache_leaves_room_for_others(small_disk, monkeypatch, log_lines):
    monkeypatch.setattr(cache_module, "LOOK_EVERY", 1)
    cache = filled(small_disk, frames=100, slot=200_000)
    disk = os.statvfs(small_disk)
    assert not cache.accepting and "No space left" in log_lines[0]
    assert disk.f_bavail >= disk.f_blocks // 20 - 200_000 // disk.f_frsize > 0


def test_a_file_that_may_not_grow(folder, log_lines):
    cache = open_cache(folder, frames=20, slot=10_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (55_000, before[1]))
    try:
        cache.put(np.arange(20), planes(range(20), 10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert check(cache) == 5 and not cache.accepting and "File too large" in log_lines[0]


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DatasetError, match="FLEXOR_CACHE"):
        open_cache(tmp_path / "file" / "frames")


# in RAM


def shared() -> list[Path]:
    folder = caches.ram_folder()
    return caches.caches_in(folder)


def test_ram_is_shared_and_goes_with_its_last_user():
    first = filled(None)
    second = open_cache(None)
    assert second.complete and len(shared()) == 1
    first.close()
    assert check(second) == 20 and len(shared()) == 1
    second.close()
    assert not shared()


def test_ram_goes_without_being_closed():
    filled(None)
    assert not shared()


@pytest.mark.ranks(waits=True)
def test_killed_runs_leave_no_memory_behind(tmp_path):
    with filling(None, tmp_path, 20, SLOT, wait=True):
        wrist = open_cache(None, CacheKey("f1", "wrist", None))
        assert len(shared()) == 2  # in use: not swept
    wrist.close()
    assert len(shared()) == 1  # the killed one's
    with filling(None, tmp_path, 20, SLOT, wait=True):
        assert len(shared()) == 1
    assert check(open_cache(None)) > 0  # the same run again finds what was decoded
    with filling(None, tmp_path, 20, SLOT, wait=True):
        pass
    wrist = open_cache(None, CacheKey("f1", "wrist", None))
    assert [path.name for path in shared()] == [CacheKey("f1", "wrist", None).folder_name]


def test_no_room_in_shared_memory(small_disk, monkeypatch):
    monkeypatch.setattr(caches, "SHARED_MEMORY", small_disk)
    first = open_cache(None, frames=30, slot=200_000)
    assert len(shared()) == 1
    other = filled(None, CacheKey("f1", "wrist", None), frames=30, slot=200_000)
    assert len(shared()) == 1  # what the first will need is spoken for
    assert other.accepting and check(other) == 30
    first.put(np.arange(30), planes(range(30), 200_000))
    assert check(first) == 30


def test_part_of_the_frames_in_shared_memory(small_disk, monkeypatch):
    """All frames would not fit; those of the chosen episodes do."""
    monkeypatch.setattr(caches, "SHARED_MEMORY", small_disk)
    cache = FrameCache.open(None, KEY, 1000, 200_000, LAYOUT, expected=10 * 200_000)
    cache.put(np.arange(500, 510), planes(range(500, 510), 200_000))
    assert len(shared()) == 1 and check(cache) == 10 and list_caches()[0].expected == 2_000_000
    more = FrameCache.open(None, KEY, 1000, 200_000, LAYOUT, expected=20 * 200_000)
    assert check(more) == 10 and list_caches()[0].expected == 4_000_000


def test_no_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(caches, "SHARED_MEMORY", tmp_path / "none")
    cache = filled(None)
    assert check(cache) == 20 and cache.complete
    cache.sync()
    cache.close()
