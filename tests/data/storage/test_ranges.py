"""Bytes by position: local files, remote files over a network that fails, and the blocks kept of them."""

import logging
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flexor.data.storage.ranges as ranges
import flexor.data.storage.remote as remote
from flexor.core.errors import DatasetError, SourceError
from flexor.data.storage.block_cache import BLOCK, BlockCache
from flexor.data.storage.ranges import LocalRanges, RemoteRanges
from flexor.data.storage.remote import HubFile, fsspec_file, http_options
from support.file_server import FileServer
from support.limits import LIMIT_S, wait_for

CONTENT = np.random.default_rng(0).bytes(5 * BLOCK + 12345)
PLACES = st.tuples(st.integers(0, len(CONTENT)), st.integers(0, 3 * BLOCK))


# Local files


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("local") / "file.bin"
    path.write_bytes(CONTENT)
    return path


@settings(max_examples=50)
@given(place=PLACES)
def test_local_bytes(local, place):
    offset, count = place
    file = LocalRanges(local)
    assert file.size == len(CONTENT) and file.name == str(local)
    file.ahead(offset, count)
    if offset + count <= len(CONTENT):
        assert file.read(offset, count) == CONTENT[offset : offset + count]
    else:
        with pytest.raises(DatasetError, match=r"file\.bin: expected .* bytes .* truncated"):
            file.read(offset, count)


def test_missing_local_file(tmp_path):
    with pytest.raises(DatasetError, match=r"gone\.mp4 can't be read: No such file"):
        LocalRanges(tmp_path / "gone.mp4")


def test_few_files_are_open_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "OPEN_FILES", 8)
    files = []
    for i in range(60):
        path = tmp_path / f"{i}.bin"
        path.write_bytes(bytes([i]) * 1000)
        files.append(LocalRanges(path))

    def read_all(seed: int) -> int:
        order = np.random.default_rng(seed).permutation(len(files) * 5) % len(files)
        return sum(files[i].read(i, 10) == bytes([i]) * 10 for i in order)

    with ThreadPoolExecutor(8) as pool:  # files are closed while other threads read them
        assert list(pool.map(read_all, range(8))) == [300] * 8
    descriptors = Path("/proc/self/fd")  # Linux only; elsewhere the reading above is the test
    opened = (
        [str(d.readlink()) for d in descriptors.iterdir() if d.is_symlink()] if descriptors.is_dir() else []
    )
    assert sum(name.startswith(str(tmp_path)) for name in opened) <= 8


def test_a_replaced_file_is_not_read_through_the_old_one(tmp_path):
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    assert LocalRanges(path).read(0, 3) == b"old"
    path.unlink()
    path.write_bytes(b"new!")
    assert LocalRanges(path).read(0, 4) == b"new!"


# Remote files


@pytest.fixture
def quick(monkeypatch):
    """Waits that a test can afford."""
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(remote, "LONGEST_WAIT", 0.05)


@pytest.fixture
def server(tmp_path, quick):
    (tmp_path / "served").mkdir()
    (tmp_path / "served/file.bin").write_bytes(CONTENT)
    with FileServer(tmp_path / "served") as server:
        yield server


def web_file(client: str, server: FileServer):
    """The served file through either of the two HTTP clients that are used."""
    address = f"{server.address}/file.bin"
    if client == "hub":
        return HubFile(name=address, size=len(CONTENT), identity=address)
    pytest.importorskip("aiohttp", reason="fsspec reads http:// through aiohttp, which is not installed")
    import fsspec

    fs = fsspec.filesystem("http", **http_options())
    return fsspec_file(fs, address, address, fs.info(address))


CLIENTS = pytest.mark.parametrize("client", ["hub", "http"])


def opened(client: str, server: FileServer, folder: Path, limit: int = 1 << 30) -> RemoteRanges:
    return RemoteRanges(web_file(client, server), BlockCache(folder / "blocks", limit))


@CLIENTS
@settings(max_examples=20)
@given(place=PLACES)
def test_remote_bytes(client, server, tmp_path, place):
    offset, count = place
    file = opened(client, server, tmp_path)
    if offset + count <= len(CONTENT):
        assert file.read(offset, count) == CONTENT[offset : offset + count]
    else:
        with pytest.raises(DatasetError, match=r"expected .* bytes at"):
            file.read(offset, count)


def test_adjacent_blocks_come_in_one_request_and_only_once(server, tmp_path):
    file = opened("hub", server, tmp_path)
    file.read(2 * BLOCK + 5, 10)
    assert server.requests == [("file.bin", 2 * BLOCK, 3 * BLOCK)]
    assert file.read(0, len(CONTENT)) == CONTENT
    assert server.requests[1:] == [("file.bin", 0, 2 * BLOCK), ("file.bin", 3 * BLOCK, len(CONTENT))]
    # Another process, or the next epoch.
    assert opened("hub", server, tmp_path).read(7, 4 * BLOCK) == CONTENT[7 : 7 + 4 * BLOCK]
    assert len(server.requests) == 3


def test_long_reads_are_several_requests(server, tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "LONGEST_REQUEST", 2 * BLOCK)
    assert opened("hub", server, tmp_path).read(0, len(CONTENT)) == CONTENT
    assert [end - start for _, start, end in server.requests] == [
        2 * BLOCK,
        2 * BLOCK,
        len(CONTENT) - 4 * BLOCK,
    ]


@CLIENTS
def test_many_threads_fetch_each_block_once(client, server, tmp_path):
    server.latency = 0.02
    file = opened(client, server, tmp_path)

    def read(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        offset = int(rng.integers(len(CONTENT) - 1))
        count = int(rng.integers(1, min(len(CONTENT) - offset, 2 * BLOCK) + 1))
        if seed % 3 == 0:
            file.ahead(offset, count)
        return file.read(offset, count) == CONTENT[offset : offset + count]

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(read, range(60)))
    blocks_asked = [n for _, start, end in server.requests for n in range(start // BLOCK, -(-end // BLOCK))]
    assert len(blocks_asked) == len(set(blocks_asked))


def test_read_ahead_is_there_when_it_is_wanted(server, tmp_path):
    file = opened("hub", server, tmp_path)
    file.ahead(BLOCK + 1, 2 * BLOCK)
    file.ahead(10 * BLOCK, BLOCK)  # past the end: nothing to do
    wait_for(lambda: all(file._cache.has(file._file.identity, n) for n in (1, 2, 3)))
    assert file.read(BLOCK + 1, 2 * BLOCK) == CONTENT[BLOCK + 1 : 3 * BLOCK + 1]
    assert server.requests == [("file.bin", BLOCK, 4 * BLOCK)]
    file.ahead(BLOCK + 1, BLOCK)
    assert file.read(0, 1) == CONTENT[:1]
    assert len(server.requests) == 2  # what is here is not asked for again


def test_read_ahead_is_bounded(server, tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "AHEAD_BYTES", 2 * BLOCK)
    file = opened("hub", server, tmp_path)
    server.go.clear()
    for n in range(5):
        file.ahead(n * BLOCK, BLOCK)
    server.go.set()
    wait_for(lambda: ranges._read_ahead._bytes == 0)
    assert len(server.requests) == 2


def test_read_ahead_that_fails_is_told_to_the_reader(server, tmp_path):
    file = opened("hub", server, tmp_path)
    server.faults.append(404)
    file.ahead(0, 1)
    wait_for(lambda: ranges._read_ahead._bytes == 0)
    server.faults.append(404)
    with pytest.raises(DatasetError, match="status 404"):
        file.read(0, 1)
    assert file.read(0, 1) == CONTENT[:1]  # and nothing stays locked


# What goes wrong on the way


@CLIENTS
@pytest.mark.parametrize(
    "faults",
    [["drop"], ["drop"] * 3, ["short", "short"], [503] * 5, [500, 502, 504], [429], ["short", 503, "drop"]],
    ids=str,
)
def test_passing_faults_are_got_over(client, server, tmp_path, faults, caplog):
    file = opened(client, server, tmp_path)
    server.faults.extend(faults)
    with caplog.at_level(logging.INFO, "flexor"):
        assert file.read(5, 2 * BLOCK) == CONTENT[5 : 5 + 2 * BLOCK]
    assert len(server.requests) == len(faults) + 1
    assert sum("trying again" in record.message for record in caplog.records) == len(faults)


@CLIENTS
def test_a_stalled_answer_is_given_up(client, server, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "TIMEOUT", 2.0)
    server.faults.append("stall")
    assert opened(client, server, tmp_path).read(0, 100) == CONTENT[:100]
    assert len(server.requests) >= 2  # a busy machine may take too long for the second answer too


@CLIENTS
@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_honoured(client, server, tmp_path, form, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", waits.append)
    value = "150" if form == "seconds" else formatdate(time.time() + 200, usegmt=True)
    server.faults.append((429, {"Retry-After": value}))
    file = opened(client, server, tmp_path)
    assert file.read(0, 100) == CONTENT[:100]
    assert any(100 < wait <= 200 for wait in waits)


def test_a_rate_limit_is_kept_to(server, tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "LONGEST_REQUEST", BLOCK)
    server.per_second = 4
    assert opened("hub", server, tmp_path).read(0, len(CONTENT)) == CONTENT


@CLIENTS
def test_giving_up_says_what_where_and_what_to_do(client, server, tmp_path):
    server.faults.extend([503] * 20)
    with pytest.raises(SourceError) as caught:
        opened(client, server, tmp_path).read(BLOCK, 100)
    message = str(caught.value)
    assert f"{server.address}/file.bin (bytes {BLOCK} to {2 * BLOCK})" in message
    assert "after 8 attempts" in message and "status 503" in message and "Check the network" in message
    assert len(server.requests) == 8


@CLIENTS
@pytest.mark.parametrize(
    ("status", "fix"), [(401, "credentials"), (403, "credentials"), (404, "Check the URL")]
)
def test_no_second_attempt_where_it_is_of_no_use(client, server, tmp_path, status, fix):
    server.faults.extend([status] * 3)
    with pytest.raises(DatasetError, match=f"status {status}.*{fix}"):
        opened(client, server, tmp_path).read(0, 100)
    assert len(server.requests) == 1


def test_a_server_that_is_gone(server, tmp_path):
    opened("hub", server, tmp_path).read(0, 10)
    gone = HubFile("http://127.0.0.1:9/file.bin", len(CONTENT), f"{server.address}/file.bin")
    file = RemoteRanges(gone, BlockCache(tmp_path / "blocks", 1 << 30))
    assert file.read(5, 10) == CONTENT[5:15]  # from the blocks
    with pytest.raises(DatasetError, match=r"127\.0\.0\.1:9/file\.bin .* after 8 attempts: ConnectError"):
        file.read(BLOCK, 10)


@CLIENTS
def test_a_server_without_ranges_is_named(client, server, tmp_path):
    server.knows_ranges = False
    with pytest.raises(SourceError, match="the server ignores byte ranges"):
        opened(client, server, tmp_path).read(BLOCK, 100)


@CLIENTS
@pytest.mark.parametrize("change", ["shorter", "longer"])
def test_a_file_whose_size_changes(client, server, tmp_path, change):
    file = opened(client, server, tmp_path)
    file.read(0, 10)
    served = server.root / "file.bin"
    served.write_bytes(CONTENT[: 2 * BLOCK] if change == "shorter" else CONTENT + b"more")
    with pytest.raises(SourceError, match=r"file\.bin has changed since it was opened"):
        file.read(3 * BLOCK, 10)


def test_a_file_whose_content_changes(server, tmp_path):
    file = opened("http", server, tmp_path)
    file.read(0, 10)
    (server.root / "file.bin").write_bytes(CONTENT[::-1])
    with pytest.raises(SourceError, match=r"file\.bin has changed since it was opened"):
        file.read(3 * BLOCK, 10)


def test_other_file_systems(tmp_path, quick, monkeypatch):
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.pipe_file("/bucket/file.bin", CONTENT)

    def file():
        info = fs.info("/bucket/file.bin")
        remote_file = fsspec_file(fs, "/bucket/file.bin", "memory://bucket/file.bin", info)
        return RemoteRanges(remote_file, BlockCache(tmp_path / "blocks", 1 << 30))

    reader = file()
    assert reader.read(BLOCK - 5, 10) == CONTENT[BLOCK - 5 : BLOCK + 5]
    assert file().read(0, len(CONTENT)) == CONTENT
    monkeypatch.setattr(remote, "RECHECK", 0.0)
    fs.pipe_file("/bucket/file.bin", CONTENT[::-1])
    uncached = RemoteRanges(reader._file, BlockCache(tmp_path / "other", 0))
    with pytest.raises(DatasetError, match="has changed since it was opened"):
        uncached.read(0, 1)
    fs.rm("/bucket/file.bin")
    with pytest.raises(DatasetError, match="can't be read: FileNotFoundError"):
        uncached.read(0, 1)


def test_a_cut_block_is_fetched_again(server, tmp_path):
    opened("hub", server, tmp_path).read(0, 10)
    [path] = [path for path in (tmp_path / "blocks").rglob("*") if path.is_file()]
    path.write_bytes(b"cut")
    assert opened("hub", server, tmp_path).read(0, 10) == CONTENT[:10]
    assert len(server.requests) == 2


@pytest.mark.parametrize("trouble", ["disk", "limit"])
def test_without_disk_space_reading_goes_on(server, tmp_path, caplog, monkeypatch, trouble):
    if trouble == "disk":

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
    file = opened("hub", server, tmp_path, 1 << 30 if trouble == "disk" else 0)
    assert file.read(0, len(CONTENT)) == CONTENT
    assert file.read(0, len(CONTENT)) == CONTENT
    assert len(server.requests) == 1  # a little is kept in memory, so that read-ahead is not in vain
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == (1 if trouble == "disk" else 0)
    assert not [path for path in (tmp_path / "blocks").rglob("*") if path.is_file()]


def test_threads_of_read_ahead_do_not_hold_up_the_end(tmp_path):
    script = f"""
import threading
from flexor.data.storage.block_cache import BlockCache
from flexor.data.storage.ranges import RemoteRanges
from pathlib import Path
class Never:
    name, size, identity = "never", 100, "never"
    def get(self, start, end):
        threading.Event().wait()
RemoteRanges(Never(), BlockCache(Path({str(tmp_path)!r}), 0)).ahead(0, 10)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=LIMIT_S)
