"""Looking at caches and removing them: sizes are the disk's, and nothing goes that somebody uses."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from flexor.data.frames import cache_folders as caches
from flexor.data.frames.cache_folders import CacheKey, list_caches, make_room, prune
from support.frame_caches import KEY, SLOT, check, filled, filling, open_cache, own_folders
from support.limits import LIMIT_S


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    return own_folders(tmp_path, monkeypatch)


def test_list(folder):
    cache = filled(folder, CacheKey("f1", "top", (4, 6), None, "me/blocks"), frames=50, slot=10_000)
    (info,) = list_caches()
    assert (info.dataset, info.camera, info.size, info.jpeg) == ("me/blocks", "top", (4, 6), None)
    assert (info.frames, info.ready, info.in_use, info.broken) == (50, 50, True, False)
    assert 500_000 <= info.nbytes <= 600_000 and info.expected == 500_000
    assert abs(info.last_used - time.time()) < LIMIT_S
    cache.close()
    assert not list_caches()[0].in_use
    json.dumps([info.to_json() for info in list_caches()])
    assert "me/blocks" in caches.render(list_caches()) and "50 of 50" in caches.render(list_caches())


def test_nothing_to_list(tmp_path):
    assert list_caches() == [] and prune(everything=True) == []
    assert not (tmp_path / "cache").exists()
    assert "no frame caches" in caches.render([])


def used_days_ago(folder: Path, days: dict[str, float]) -> None:
    """A closed cache per camera of 100 kB, last used that long ago."""
    for camera, age in days.items():
        key = CacheKey("f1", camera, None, None, f"me/{camera}")
        filled(folder, key, frames=10, slot=10_000).close()
        then = time.time() - age * 86400
        os.utime(folder / key.folder_name / "lock", (then, then))


def names(infos) -> list[str]:
    return sorted(info.camera for info in infos)


@pytest.mark.parametrize(
    "options, removed",
    [
        ({}, []),
        ({"older_than": 2.5 * 86400}, ["c", "d"]),
        ({"limit_bytes": 250_000}, ["c", "d"]),
        ({"limit_bytes": 10**9}, []),
        ({"everything": True}, ["a", "b", "c", "d"]),
        ({"dataset": "me/b"}, ["b"]),
        ({"dataset": "me/d", "older_than": 5 * 86400}, []),
        ({"dataset": "me/none"}, []),
    ],
)
def test_prune(folder, options, removed):
    used_days_ago(folder, {"a": 1, "b": 2, "c": 3, "d": 4})
    assert names(prune(**options)) == removed
    assert names(list_caches()) == sorted({"a", "b", "c", "d"} - set(removed))


@pytest.mark.ranks(waits=True)
def test_prune_leaves_what_is_in_use(folder, tmp_path):
    with filling(folder, tmp_path, 20, SLOT, wait=True):
        assert prune(everything=True) == []
        assert len(list_caches()) == 1
    assert len(prune(everything=True)) == 1
    assert list_caches() == []


def test_prune_takes_what_is_broken(folder):
    filled(folder).close()
    (folder / "halfmade").mkdir()
    (folder / "halfmade" / "data").write_bytes(bytes(100))
    (folder / ".removing-old-1").mkdir()  # killed while deleting it
    assert [info.broken for info in list_caches()].count(True) == 1
    assert "broken" in caches.render(list_caches())
    assert [info.folder.name for info in prune()] == ["halfmade"]
    assert sorted(path.name for path in folder.iterdir()) == [".lock", KEY.folder_name]


def test_pruned_and_opened_at_once(folder):
    """Whoever opens while others prune gets a cache that works, and keeps it."""
    stop = threading.Event()

    def prune_on() -> None:
        while not stop.is_set():
            prune(everything=True)

    pruner = threading.Thread(target=prune_on)
    pruner.start()
    try:
        for _ in range(40):
            cache = filled(folder)
            assert check(cache) == 20 and (folder / KEY.folder_name / "header.json").exists()
            cache.close()
    finally:
        stop.set()
        pruner.join()


@pytest.mark.parametrize(
    "limit, need, fits, left",
    [
        (10**9, 100_000, True, "abcd"),
        (470_000, 100_000, True, "abc"),
        (450_000, 300_000, True, "a"),
        (450_000, 450_000, False, "abcd"),  # a is in use; nothing goes in vain
        (450_000, 10**15, False, "abcd"),
        (10**18, 10**15, False, "abcd"),  # more than the disk has
    ],
)
def test_make_room(folder, limit, need, fits, left):
    used_days_ago(folder, {"a": 9, "b": 2, "c": 3, "d": 4})
    used = open_cache(folder, CacheKey("f1", "a", None), frames=10, slot=10_000)
    assert make_room(folder, {CacheKey("f1", "new", None): need}, limit) is fits
    assert names(list_caches()) == list(left)
    used.close()


def test_making_room_for_what_is_there_already(folder):
    used_days_ago(folder, {"a": 1, "b": 9})
    assert make_room(folder, {CacheKey("f1", "b", None): 100_000}, 250_000)
    assert names(list_caches()) == ["a", "b"]
    assert make_room(folder, {CacheKey("f1", "b", None): 100_000}, 120_000)
    assert names(list_caches()) == ["b"]
