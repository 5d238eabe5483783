"""Checksums of frames: any damage changes them, and they are the same for ever."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexor.data.frames.checksum import checksums


def checksum_of(content: bytes, frame: int = 0) -> int:
    return int(checksums(np.frombuffer(content, np.uint8)[None], np.array([frame]))[0])


@given(st.binary(min_size=1, max_size=200), st.integers(1, 60), st.data())
def test_a_changed_byte_is_noticed(content, times, data):
    content *= times
    at = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[at] ^= data.draw(st.integers(1, 255))
    assert checksum_of(bytes(changed)) != checksum_of(content)


@given(st.binary(min_size=2, max_size=100), st.integers(0, 100))
def test_lengths_and_ids_count(content, frame):
    assert checksum_of(content, frame) != checksum_of(content, frame + 1)
    assert checksum_of(content, frame) != checksum_of(content[:-1], frame)
    assert checksum_of(content, frame) != checksum_of(content + b"\0", frame)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 36, 4096])
def test_zeros_are_not_zero(size):
    """A hole in a file is no frame."""
    assert (checksums(np.zeros((5, size), np.uint8), np.arange(5)) != 0).all()


def test_moved_blocks_are_noticed():
    content = np.arange(16384, dtype=np.uint16).view(np.uint8)
    moved = np.roll(content, 4096)
    assert checksum_of(content.tobytes()) != checksum_of(moved.tobytes())


def test_they_are_the_same_for_ever():
    """They are stored: another formula would need another version of the cache."""
    assert [checksum_of(b"", 3), checksum_of(b"flexor", 3), checksum_of(bytes(range(100)) * 100, 3)] == [
        8709371129873690708,
        18397865415183436452,
        2091934852537416948,
    ]


def test_rows_of_a_larger_array():
    rows = np.random.default_rng(0).integers(0, 256, (6, 9101), np.uint8)
    ids = np.array([4, 9, 1, 0, 7, 2])
    assert checksums(rows[:, 3:], ids).tolist() == [
        checksum_of(r[3:].tobytes(), i) for r, i in zip(rows, ids.tolist())
    ]
