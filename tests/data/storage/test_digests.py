"""Hashes of files: of their contents, wherever and whenever they were written; made once."""

import os
import time
from pathlib import Path

import pytest

from flexor.data.storage import digests as module
from flexor.data.storage.digests import BLOCK, BLOCKS, digests, file_digest


@pytest.fixture
def files(tmp_path, monkeypatch) -> dict[str, Path]:
    monkeypatch.setenv("FLEXOR_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "data"
    root.mkdir()
    (root / "a.parquet").write_bytes(bytes(range(256)) * 4096)
    (root / "b.mp4").write_bytes(bytes(range(256)) * 4096)
    return {name: root / name for name in ("a.parquet", "b.mp4")}


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """The files that were read."""
    names: list[str] = []

    def noted(path: Path) -> str:
        names.append(path.name)
        return file_digest(path)

    monkeypatch.setattr(module, "file_digest", noted)
    return names


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_each_byte_of_a_table_counts(files):
    before = file_digest(files["a.parquet"])
    flip(files["a.parquet"], 777_777)
    assert file_digest(files["a.parquet"]) != before


@pytest.mark.parametrize("at", [0, BLOCK - 1, -1, -BLOCK])
def test_ends_of_a_video_count(files, at):
    path = files["b.mp4"]
    before = file_digest(path)
    flip(path, at % path.stat().st_size)
    assert file_digest(path) != before


def test_blocks_of_a_video_follow_from_its_size():
    for size in (0, 1, BLOCK, BLOCK * BLOCKS, BLOCK * BLOCKS + 1, 10**9):
        starts = module._sampled(size)
        assert starts == sorted({*starts}) and len(starts) <= BLOCKS
        assert not size or (starts[0] == 0 and starts[-1] + BLOCK >= size)


def test_videos_of_other_sizes_differ(files):
    before = file_digest(files["b.mp4"])
    files["b.mp4"].write_bytes(files["b.mp4"].read_bytes()[:-256])
    assert file_digest(files["b.mp4"]) != before


def test_hashes_are_made_once(files, hashed, monkeypatch):
    root = files["b.mp4"].parent
    monkeypatch.setattr(module, "SETTLED_NS", -(10**12))
    first = digests(root, files)
    assert hashed == [*files] and digests(root, files) == first and hashed == [*files]
    hashed.clear()
    flip(files["b.mp4"], 0)
    second = digests(root, files)
    assert (
        hashed == ["b.mp4"]
        and second["b.mp4"] != first["b.mp4"]
        and second["a.parquet"] == first["a.parquet"]
    )


def test_a_file_with_its_old_time_is_read_again(files, hashed, monkeypatch):
    """As `cp -p` or a tool that restores times leaves it."""
    monkeypatch.setattr(module, "SETTLED_NS", -(10**12))
    path = files["a.parquet"]
    first = digests(path.parent, files)
    status = path.stat()
    time.sleep(0.02)  # coarse clocks of file systems
    flip(path, 5)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digests(path.parent, files)["a.parquet"] != first["a.parquet"]


def test_a_file_that_was_just_written_is_not_remembered(files, hashed):
    """It may be written to again within the same tick of the clock."""
    root = files["b.mp4"].parent
    digests(root, files)
    digests(root, files)
    assert hashed == [*files, *files]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"a.parquet": 3}', b'{"a.parquet": [1, 2]}', b"\xff"]
)
def test_a_damaged_memory_is_ignored(content, files, hashed, monkeypatch):
    monkeypatch.setattr(module, "SETTLED_NS", -(10**12))
    root = files["b.mp4"].parent
    first = digests(root, files)
    (memory,) = (root.parent / "cache" / "digests").iterdir()
    memory.write_bytes(content)
    assert digests(root, files) == first and len(hashed) == 4


def test_no_room_to_remember(files, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "SETTLED_NS", -(10**12))
    (tmp_path / "cache").write_text("a file, not a folder")
    assert digests(files["b.mp4"].parent, files).keys() == files.keys()
