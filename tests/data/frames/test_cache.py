"""Frame caches: what is marked is whole, whoever was killed; what is in use stays; a full disk is no crash."""

import json
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexor.core.errors import DatasetError
from flexor.data.frames import cache as cache_module
from flexor.data.frames import cache_files
from flexor.data.frames import cache_folders as caches
from flexor.data.frames.cache import FrameCache
from flexor.data.frames.cache_folders import CacheKey, list_caches
from support.frame_caches import (
    KEY,
    LAYOUT,
    SLOT,
    check,
    filled,
    filling,
    jpeg,
    open_cache,
    own_folders,
    planes,
)
from support.runs import SERVER


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    return own_folders(tmp_path, monkeypatch)


# one process


def test_frames_come_back(folder):
    cache = open_cache(folder)
    assert cache.count == 0 and not cache.complete and not cache.has(np.arange(20)).any()
    cache.put(np.array([3, 19, 0]), planes([3, 19, 0]))
    assert np.flatnonzero(cache.has(np.arange(20))).tolist() == [0, 3, 19]
    assert (cache.view(19) == planes([19])[0]).all()
    cache.close()
    again = open_cache(folder)
    assert again.count == check(again) == 3
    again.put(np.arange(20), planes(np.arange(20)))
    assert again.complete and check(again) == 20


def test_a_view_cannot_change_the_cache(folder):
    view = filled(folder).view(2)
    assert not view.flags.writeable


def test_views_outlive_the_cache(folder):
    for cache in (filled(folder), filled(None)):
        view = cache.view(7)
        cache.close()
        cache.close()
        cache.put(np.array([1]), planes([1]))  # a decoding thread that has not heard of it yet
        assert (view == planes([7])[0]).all()


@settings(max_examples=30)
@given(st.lists(st.tuples(st.lists(st.integers(0, 19), min_size=1, max_size=6), st.booleans()), max_size=8))
def test_any_history(tmp_path_factory, history):
    """Put and reopen in any order: there is what was put, and nothing else."""
    folder = tmp_path_factory.mktemp("caches")
    cache, put = open_cache(folder), set()
    for ids, reopen in history:
        cache.put(np.array(ids), planes(ids))
        put.update(ids)
        if reopen:
            cache.close()
            cache = open_cache(folder)
        assert np.flatnonzero(cache.has(np.arange(20))).tolist() == sorted(put)
        check(cache)
    cache.close()


@pytest.mark.parametrize("tier", ["disk", "shared memory", "own memory"])
def test_jpeg(folder, tier, monkeypatch, tmp_path):
    if tier == "own memory":
        monkeypatch.setattr(caches, "SHARED_MEMORY", tmp_path / "none")
    key = CacheKey("f1", "top", (4, 6), 95)
    cache = open_cache(folder if tier == "disk" else None, key)
    ids = np.arange(0, 20, 2)
    cache.put(ids, [jpeg(i) for i in ids])
    assert cache.count == 10 and not cache.has(np.array([1]))[0]
    assert [cache.view(i).tobytes() for i in ids] == [jpeg(i) for i in ids]
    cache.close()
    if tier == "disk":
        again = open_cache(folder, key)
        assert [again.view(i).tobytes() for i in ids] == [jpeg(i) for i in ids]


def test_holes_cost_nothing(folder):
    cache = open_cache(folder, CacheKey("f1", "top", None, 95), frames=100_000, slot=460_800)
    cache.put(np.array([99_999]), [jpeg(9)])
    cache.close()
    (info,) = list_caches()
    assert info.nbytes < 2_000_000 < info.expected


def test_threads_fill_and_read(folder):
    cache = open_cache(folder, frames=100, slot=1001)
    counts: list[int] = []

    def fill(seed: int) -> None:
        for ids in np.array_split(np.random.default_rng(seed).permutation(100), 40):
            cache.put(ids, planes(ids, 1001))
            counts.append(check(cache))

    threads = [threading.Thread(target=fill, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.complete and len(counts) == 160


def test_what_is_marked_can_be_read_at_once(folder):
    """Read every frame in the instant it is marked, while another thread writes."""
    cache, content = open_cache(folder, frames=40, slot=2_000_000), planes(range(40), 2_000_000)
    writer = threading.Thread(target=cache.put, args=(np.arange(40), content))
    writer.start()
    for frame in range(40):
        while not cache.has(np.array([frame]))[0]:
            assert writer.is_alive() or cache.complete
        assert (cache.view(frame) == content[frame]).all()
    writer.join()


# several processes


def fill_slowly(folder: Path | None, seed: int, frames: int, slot: int, shared_memory: Path) -> None:
    caches.SHARED_MEMORY = shared_memory
    cache = FrameCache.open(folder, KEY, frames, slot, LAYOUT)
    for ids in np.array_split(np.random.default_rng(seed).permutation(frames), frames // 4):
        cache.put(ids, planes(ids, slot))
        check(cache)
    assert cache.complete
    if seed != 3:
        cache.close()  # and one of them just ends


@pytest.mark.ranks(waits=True)
def test_processes_fill_the_same_cache(folder, tmp_path):
    workers = [
        SERVER.Process(target=fill_slowly, args=(folder, seed, 60, 5000, tmp_path)) for seed in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert check(open_cache(folder, frames=60, slot=5000)) == 60


@pytest.mark.ranks(waits=True)
def test_killed_at_any_instant(folder, tmp_path):
    """While it makes the cache, while it writes and while it syncs."""
    rng, counts = random.Random(1), []
    for number in range(8):
        with filling(folder, tmp_path, frames=100, slot=1_000_001, wait=number == 7):
            time.sleep(rng.uniform(0, 0.1))
        cache = open_cache(folder, frames=100, slot=1_000_001)
        counts.append(check(cache))
        cache.close()
    assert counts == sorted(counts) and counts[-1] > 0


def test_a_fork_does_not_take_the_cache_along(tmp_path):
    cache = filled(None)
    child = os.fork()
    if child == 0:
        cache.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert cache.folder.is_dir() and open_cache(None).complete


# what is not trusted


def test_marks_of_another_boot_count_only_if_synced(folder, monkeypatch):
    cache = open_cache(folder)
    cache.put(np.arange(5), planes(range(5)))
    cache.sync()
    cache.put(np.arange(5, 9), planes(range(5, 9)))
    cache._leave()  # the machine loses power: nobody closes
    assert open_cache(folder).count == 9
    monkeypatch.setattr(cache_files, "boot_id", lambda: "another")
    again = open_cache(folder)
    assert np.flatnonzero(again.has(np.arange(20))).tolist() == [0, 1, 2, 3, 4]
    again.put(np.arange(20), planes(range(20)))
    again.close()
    monkeypatch.setattr(cache_files, "boot_id", lambda: "a third")
    assert open_cache(folder).complete


def test_a_machine_that_does_not_know_its_boot_trusts_what_is_synced(folder, monkeypatch):
    monkeypatch.setattr(cache_files, "boot_id", lambda: "")
    cache = open_cache(folder)
    cache.put(np.arange(5), planes(range(5)))
    other = open_cache(folder)
    assert other.count == 5  # while in use, it is this machine's
    other._leave()
    cache._leave()
    assert open_cache(folder).count == 0


def test_in_use_on_another_machine(folder, monkeypatch, log_lines):
    cache = filled(folder)
    cache.sync()
    monkeypatch.setattr(cache_files, "boot_id", lambda: "another")
    guest = open_cache(folder)
    assert guest.complete and not guest.accepting and "another machine" in log_lines[0]
    guest.put(np.array([1]), planes([1]))
    guest.close()
    assert check(cache) == 20


def _other_version(header: Path) -> None:
    header.write_text(json.dumps({**json.loads(header.read_text()), "slot": 35}))


@pytest.mark.parametrize(
    "damage",
    {
        "no header": lambda cache: (cache / "header.json").unlink(),
        "half a header": lambda cache: os.truncate(cache / "header.json", 30),
        "no object": lambda cache: (cache / "header.json").write_text("[1]"),
        "other sizes": lambda cache: _other_version(cache / "header.json"),
        "short data": lambda cache: os.truncate(cache / "data", 20 * SLOT - 1),
        "no data": lambda cache: (cache / "data").unlink(),
        "short marks": lambda cache: os.truncate(cache / "ready", 19),
    }.items(),
    ids=lambda item: item[0],
)
def test_what_does_not_fit_is_made_anew(folder, damage):
    filled(folder).close()
    damage[1](folder / KEY.folder_name)
    cache = open_cache(folder)
    assert cache.count == 0
    cache.put(np.arange(20), planes(range(20)))
    assert check(cache) == 20


@pytest.mark.parametrize("change", [{"frames": 21}, {"slot": 40}, {"layout": {"height": 5}}])
def test_another_form_under_the_same_key_is_made_anew(folder, change):
    filled(folder).close()
    form = {"frames": 20, "slot": SLOT, "layout": LAYOUT, **change}
    cache = FrameCache.open(folder, KEY, **form)
    assert cache.count == 0 and cache.planes.shape == (form["frames"], form["slot"])


def test_damaged_while_in_use(folder):
    cache = filled(folder)
    (folder / KEY.folder_name / "header.json").unlink()
    with pytest.raises(DatasetError, match="damaged"):
        open_cache(folder)
    cache.close()
    assert open_cache(folder).count == 0


def test_settings_have_caches_of_their_own():
    keys = [
        KEY,
        CacheKey("f2", KEY.camera, None),
        CacheKey("f1", "wrist", None),
        CacheKey("f1", KEY.camera, (4, 6)),
        CacheKey("f1", KEY.camera, None, 95),
        CacheKey("f1", KEY.camera, None, 90),
    ]
    assert len({key.folder_name for key in keys}) == len(keys)
    assert CacheKey("f1", KEY.camera, None, None, "copy/of-blocks").folder_name == KEY.folder_name


# damage


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize(
    "damage",
    {
        "a bit of a frame": lambda cache: flip(cache / "data", 7 * SLOT + 20),
        "a block of zeros": lambda cache: overwrite(cache / "data", 7 * SLOT, bytes(SLOT)),
        "another frame": lambda cache: overwrite(cache / "data", 7 * SLOT, planes([8])[0].tobytes()),
        "its checksum": lambda cache: flip(cache / "sums", 8 * 7 + 3),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_damaged_frame_is_forgotten(folder, damage, log_lines):
    filled(folder).close()
    damage[1](folder / KEY.folder_name)
    cache, other = open_cache(folder), open_cache(folder)
    out = np.empty((20, SLOT), np.uint8)
    good = cache.gather(np.arange(20), out)
    assert np.flatnonzero(~good).tolist() == [7] and (out[good] == planes(np.flatnonzero(good))).all()
    for each in (cache, other):  # for all processes
        assert np.flatnonzero(~each.has(np.arange(20))).tolist() == [7] and each.view(7) is None
    assert len(log_lines) == 1 and "damaged" in log_lines[0] and KEY.folder_name in log_lines[0]
    cache.put(np.array([7]), planes([7]))
    for each in (cache, other):
        assert each.gather(np.arange(20), out).all() and (out == planes(range(20))).all()
    assert len(log_lines) == 1


def overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def test_a_damaged_frame_is_forgotten_by_view(folder):
    filled(folder).close()
    flip(folder / KEY.folder_name / "data", 3 * SLOT)
    cache = open_cache(folder)
    assert cache.view(3) is None and not cache.has(np.array([3]))[0]
    assert (cache.view(4) == planes([4])[0]).all()


@pytest.mark.parametrize("file", ["data", "sizes", "sums"])
def test_a_damaged_jpeg_is_forgotten(folder, file):
    key = CacheKey("f1", "top", (4, 6), 95)
    cache = open_cache(folder, key)
    cache.put(np.arange(20), [jpeg(i) for i in range(20)])
    stride = cache.planes.shape[1]
    cache.close()
    flip(folder / key.folder_name / file, {"data": 5 * stride, "sizes": 4 * 5, "sums": 8 * 5}[file])
    again = open_cache(folder, key)
    assert again.view(5) is None and not again.has(np.array([5]))[0]
    assert again.view(6).tobytes() == jpeg(6)


def test_a_mark_without_a_frame_is_not_believed(folder):
    open_cache(folder).close()
    flip(folder / KEY.folder_name / "ready", 9)
    cache = open_cache(folder)
    assert cache.has(np.array([9]))[0] and cache.view(9) is None and not cache.has(np.array([9]))[0]


def test_a_frame_is_checked_once(folder, monkeypatch):
    filled(folder).close()
    cache, out = open_cache(folder), np.empty((20, SLOT), np.uint8)
    assert cache.gather(np.arange(20), out).all()
    monkeypatch.setattr(cache_module, "checksums", None)
    assert cache.gather(np.arange(20), out).all() and cache.view(3) is not None


def test_damage_is_forgotten_in_a_cache_that_another_machine_fills(folder, monkeypatch):
    cache = filled(folder)
    cache.sync()
    monkeypatch.setattr(cache_files, "boot_id", lambda: "another")
    guest = open_cache(folder)
    flip(folder / KEY.folder_name / "data", 3 * SLOT)
    assert guest.view(3) is None and np.flatnonzero(~guest.has(np.arange(20))).tolist() == [3]


def truncate_in_use(folder: Path, shared_memory: Path, name: str, jpegs: bool) -> None:
    caches.SHARED_MEMORY = shared_memory
    key = CacheKey("f1", "top", None, 95 if jpegs else None)
    cache = open_cache(folder, key, frames=50, slot=20_000)
    content = planes(range(50), 20_000)
    cache.put(np.arange(40), [row.tobytes() for row in content] if jpegs else content)
    os.truncate(folder / key.folder_name / name, 0)
    out = np.empty((40, 20_000), np.uint8)
    for _ in range(2):
        if not jpegs:
            good = cache.gather(np.arange(40), out)
            assert (out[good] == content[:40][good]).all()
        for frame in range(40):
            view = cache.view(frame)
            assert view is None or (view == content[frame]).all() or not cache.intact()
        cache.put(np.arange(40, 50), [row.tobytes() for row in content[40:]] if jpegs else content[40:])
    assert name == "sums" or not cache.has(np.array([39]))[0]  # its checksums are known to be right
    cache.close()
    again = open_cache(folder, key, frames=50, slot=20_000)  # made anew
    again.put(np.arange(50), [row.tobytes() for row in content] if jpegs else content)
    assert again.complete
    os._exit(0)


@pytest.mark.ranks(waits=True)
@pytest.mark.parametrize("jpegs", [False, True])
@pytest.mark.parametrize("name", ["data", "ready", "sums", "sizes"])
def test_truncated_in_use(folder, name, jpegs, tmp_path):
    """No SIGBUS: what was in it is decoded again."""
    if name == "sizes" and not jpegs:
        pytest.skip("only caches of JPEGs have it")
    worker = SERVER.Process(target=truncate_in_use, args=(folder, tmp_path / "shm", name, jpegs))
    worker.start()
    worker.join()
    assert worker.exitcode == 0


def test_caches_of_an_earlier_version_are_removed(folder):
    filled(folder).close()
    header = folder / KEY.folder_name / "header.json"
    old = json.loads(header.read_text())
    del old["version"]
    header.write_text(json.dumps(old))
    (info,) = list_caches()
    assert info.broken and [i.folder for i in caches.prune()] == [info.folder]
