"""Blocks on disk: within their limit, shared by processes, never trusted blindly."""

import subprocess
import sys
import time
from pathlib import Path

import flexor.data.storage.block_cache as blocks
from flexor.data.storage.block_cache import BLOCK, BlockCache
from support.limits import LIMIT_S


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_blocks_beyond_the_limit_are_dropped_oldest_first(tmp_path):
    cache = BlockCache(tmp_path, 10 * BLOCK)
    for n in range(30):
        cache.put("file", n, bytes([n]) * BLOCK)
        if n >= 5:
            assert cache.get("file", 5, BLOCK) is not None  # used again and again: stays
        assert used(tmp_path) <= 10 * BLOCK
        time.sleep(0.002)  # times of files must differ
    assert cache.get("file", 29, BLOCK) == bytes([29]) * BLOCK
    assert cache.get("file", 6, BLOCK) is None


def test_blocks_of_another_size_are_not_used(tmp_path):
    cache = BlockCache(tmp_path, 1 << 30)
    cache.put("file", 0, b"x" * BLOCK)
    [path] = [path for path in tmp_path.rglob("*") if path.is_file()]
    path.write_bytes(b"x" * 100)
    assert cache.get("file", 0, BLOCK) is None
    cache.put("file", 0, b"y" * BLOCK)
    assert cache.get("file", 0, BLOCK) == b"y" * BLOCK


def test_another_version_of_a_file_has_other_blocks(tmp_path):
    cache = BlockCache(tmp_path, 1 << 30)
    cache.put("file etag-1", 0, b"1" * 10)
    assert cache.get("file etag-2", 0, 10) is None


def test_memory_is_bounded_without_disk_space(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "MEMORY_BLOCKS", 3)
    cache = BlockCache(tmp_path, 0)
    for n in range(10):
        cache.put("file", n, bytes([n]))
    assert [n for n in range(10) if cache.get("file", n, 1)] == [7, 8, 9]


def test_processes_share_blocks(tmp_path):
    """Four processes write and read the same folder, which is too small for them."""
    script = f"""
import sys
from pathlib import Path
from flexor.data.storage.block_cache import BLOCK, BlockCache
cache = BlockCache(Path({str(tmp_path)!r}), 12 * BLOCK)
for i in range(60):
    n = (i * 7 + int(sys.argv[1])) % 20
    data = cache.get("file", n, BLOCK)
    assert data is None or data == bytes([n]) * BLOCK
    if data is None:
        cache.put("file", n, bytes([n]) * BLOCK)
"""
    running = [subprocess.Popen([sys.executable, "-c", script, str(i)]) for i in range(4)]
    assert [process.wait(LIMIT_S) for process in running] == [0] * 4
    assert not list(tmp_path.rglob("*.partial"))
    cache = BlockCache(tmp_path, 12 * BLOCK)
    cache.put("file", 99, b"x" * BLOCK)
    assert used(tmp_path) <= 12 * BLOCK
