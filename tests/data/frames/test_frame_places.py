"""Decode processes find each frame where the clips have it, and indexes of files are in memory once."""

import os
import shutil

import numpy as np
import pytest

from flexor.data.dataset import open_dataset
from flexor.data.frames.clips import VideoClip
from flexor.data.frames.shared_memory import SharedArena
from flexor.data.video.decode_worker import FileIndexes, SharedSlots
from support.samples import write_sample

TOP = "observation.images.top"
ARRAYS = ("packet", "frame_pts", "times", "start")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_sample(tmp_path_factory.mktemp("places") / "data")


def test_frames_are_found_in_any_order(root):
    store, plain = open_dataset(root=root).store, open_dataset(root=root).store
    ids = np.random.default_rng(0).permutation(np.repeat(np.arange(38), 2))
    for part in np.split(ids, [1, 5, 30]):
        files, numbers = store.places.find(TOP, part)
        for frame, file, number in zip(part.tolist(), files.tolist(), numbers.tolist()):
            episode = int(plain.episode_of(np.array([frame]))[0])
            clip = plain.clips[TOP, episode]
            assert isinstance(clip, VideoClip)
            assert number == clip.numbers[frame - plain.first_frame_of(episode)]
            memory = SharedSlots(store.places.memory.descriptor)
            index = FileIndexes(memory).index(file)
            assert index.ranges.name == clip.file.index.ranges.name
            for name in ARRAYS:
                assert np.array_equal(getattr(index, name), getattr(clip.file.index, name))
            for name in ("offset", "size", "key", "pts", "hidden"):
                assert np.array_equal(getattr(index.packets, name), getattr(clip.file.index.packets, name))


def test_an_index_is_moved_and_not_copied(root):
    store = open_dataset(root=root).store
    clip = store.clips[TOP, 0]
    assert isinstance(clip, VideoClip)
    before = clip.file.index
    store.places.find(TOP, np.arange(7))
    size = store.places.memory.size
    assert clip.file.index is not before
    clip.file.index.times[0] = 12.5  # another process sees it
    (file,), _ = store.places.find(TOP, np.array([0]))
    assert FileIndexes(SharedSlots(store.places.memory.descriptor)).index(int(file)).times[0] == 12.5
    assert store.places.memory.size == size


def test_an_episode_that_can_not_be_read_has_a_reason(root, tmp_path):
    copy = shutil.copytree(root, tmp_path / "copy")
    store = open_dataset(root=copy).store
    video = sorted(copy.glob(f"videos/{TOP}/**/*.mp4"))[0]
    video.write_bytes(video.read_bytes()[:200])
    files, _ = store.places.find(TOP, np.arange(38))
    assert files[0] < 0 <= files[-1]
    assert video.name in store.places.why(TOP, 0)
    request, bad = store.decode_request(TOP, np.array([0, 37]), np.array([0, 0]))
    assert [*bad] == [0] and (request.places[0] >= 0).tolist() == [False, True]


def test_an_arena_gives_memory_that_does_not_overlap():
    arena, parts = SharedArena(), []
    for value, size in enumerate([0, 1, 100, 20 << 20, 63, 64, 65, 5 << 20, 12 << 20], 1):
        offset, memory = arena.take(size)
        memory[:] = value
        parts.append((value, offset, size))
    for value, offset, size in parts:
        assert os.pread(arena.descriptor, size, offset) == bytes([value]) * size
    arena.close()
    arena.close()
