"""Where datasets come from: folders, fsspec addresses and the Hub."""

import shutil
from collections.abc import Callable

import numpy as np
import pytest

import flexor.data.storage.remote as remote
from flexor.core.errors import DatasetError
from flexor.data.dataset import Dataset, open_dataset
from flexor.data.storage.ranges import LocalRanges
from flexor.data.storage.source import find_source
from support.file_server import FileServer
from support.hub_server import HubServer
from support.legacy import to_v2
from support.samples import write_sample

TOP = "observation.images.top"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    root = write_sample(folder / "v3.0")
    return {"v3.0": root, "v2.1": to_v2(root, folder / "v2.1", "v2.1")}


@pytest.fixture
def hub_at(tmp_path, monkeypatch) -> Callable[[str], None]:
    """Have the Hub answer at an address of this machine; nothing of it is here yet."""
    for name in ("HF_LEROBOT_HOME", "FLEXOR_CACHE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def answer(address: str) -> None:
        files = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)

    return answer


NOBODY = "http://127.0.0.1:9"


def test_repo_id_is_looked_for_under_lerobots_home(samples, tmp_path, monkeypatch):
    shutil.copytree(samples["v3.0"], tmp_path / "me/sample")
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))
    dataset = open_dataset("me/sample")
    assert dataset.root == tmp_path / "me/sample" and dataset.repo_id == "me/sample"


def test_file_address(samples):
    assert len(open_dataset(root=f"file://{samples['v3.0']}")) == 38


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_fsspec_address(samples, version, tmp_path, monkeypatch):
    import fsspec

    monkeypatch.setenv("FLEXOR_CACHE", str(tmp_path))
    memory = fsspec.filesystem("memory")
    memory.put(str(samples[version]), f"/bucket/{version}", recursive=True)
    dataset = open_dataset(root=f"memory://bucket/{version}", episodes=[1])
    local = open_dataset(root=samples[version], episodes=[1])
    np.testing.assert_array_equal(dataset.read(np.array([3]))[TOP], local.read(np.array([3]))[TOP])
    assert not list(tmp_path.rglob("*.mp4"))  # videos are never copied
    assert len(list((tmp_path / "blocks").rglob("*-0"))) == 1  # and only those of selected episodes are read
    assert dataset.fingerprint() == local.fingerprint()
    assert not list(tmp_path.rglob("*.partial"))


def test_fsspec_address_with_nothing_there():
    with pytest.raises(DatasetError, match=r"memory://nowhere/meta/info\.json can't be read"):
        open_dataset(root="memory://nowhere")


def test_hub_snapshot_in_the_cache_is_used_without_the_hub(samples, tmp_path, hub_at):
    """The layout huggingface_hub leaves behind; offline it must do."""
    folder = tmp_path / "hub/datasets--me--sample"
    shutil.copytree(samples["v2.1"], folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/v2.1").write_text(COMMIT)
    hub_at(NOBODY)
    assert len(open_dataset("me/sample", episodes=[1])) == 12


def test_unreachable_hub(hub_at):
    hub_at(NOBODY)
    with pytest.raises(DatasetError, match=r"me/sample is missing or incomplete in .*--dataset\.root"):
        open_dataset("me/sample")


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_hub_download_is_of_the_selected_episodes_only(samples, hub_at, version):
    with HubServer() as server:
        server.add("datasets", "me/sample", samples[version], version)
        hub_at(server.address)
        dataset = open_dataset("me/sample", episodes=[0])
        assert dataset.version == version and len(dataset) == 7
        np.testing.assert_array_equal(picture(dataset), picture(open_dataset(root=samples[version])))
    fetched = [name for name in server.whole_files if name.startswith(("file-", "episode_"))]
    videos = [name for name in fetched if name.endswith(".mp4")]
    assert len(videos) == 1 and "000" in videos[0]
    assert not server.requests


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
@pytest.mark.parametrize("address", ["me/sample", "hf://datasets/me/sample"])
def test_hub_streaming_reads_videos_by_ranges(samples, tmp_path, hub_at, monkeypatch, version, address):
    """Through broken connections and refusals; a local copy is made when asked for, and only then."""
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    with HubServer() as server:
        server.add("datasets", "me/sample", samples[version], version)
        hub_at(server.address)
        server.faults.extend(["drop", 503])
        dataset = open_dataset(address, episodes=[0], streaming=True)
        assert dataset.version == version and len(dataset) == 7
        np.testing.assert_array_equal(picture(dataset), picture(open_dataset(root=samples[version])))
        assert not list(dataset.root.rglob("*.mp4"))
        source = find_source(address, None, None, streaming=True)
        (video,) = {n for n in source._listing() if n.endswith("000.mp4")}
        assert source.streams and source.exists(video) and not source.exists("videos/none.mp4")
        assert source.local(video).stat().st_size == source.size(video) == source.ranges(video).size
        assert source.ranges(video).name == str(source.local(video))
    assert len(server.requests) == 3 and all(name.endswith("000.mp4") for name, _, _ in server.requests)
    assert sum(name.endswith(".mp4") for name in server.whole_files) == 1  # the copy
    assert len(list((tmp_path / "blocks").rglob("*-0"))) == 1


def picture(dataset: Dataset) -> np.ndarray:
    return dataset.read(np.array([3]))[TOP]


# A web server, through fsspec


@pytest.fixture
def web(samples, tmp_path, monkeypatch):
    pytest.importorskip("aiohttp", reason="fsspec reads http:// through aiohttp, which is not installed")
    monkeypatch.setenv("FLEXOR_CACHE", str(tmp_path))
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    with FileServer(samples["v3.0"].parent) as server:
        yield server


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_web_address(samples, web, version):
    web.faults.extend(["drop", 503, "short", 429])
    dataset = open_dataset(root=f"{web.address}/{version}")
    local = open_dataset(root=samples[version])
    rows = np.arange(len(local))
    np.testing.assert_array_equal(dataset.read(rows)[TOP], local.read(rows)[TOP])
    assert dataset.fingerprint() == local.fingerprint()
    assert not [name for name in web.whole_files if name.endswith(".mp4")]
    assert any(name.endswith(".mp4") for name, _, _ in web.requests)
    assert not web.faults


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_web_server_that_does_not_list(samples, web, version):
    web.lists = False
    dataset = open_dataset(root=f"{web.address}/{version}")
    assert dataset.fingerprint() == open_dataset(root=samples[version]).fingerprint()


def test_copies_get_over_broken_connections(samples, web, tmp_path):
    source = find_source(None, f"{web.address}/v3.0", None)
    [name] = source.list("videos", "000.mp4")
    web.faults.extend(["drop", "short", 500])
    assert source.local(name).read_bytes() == (samples["v3.0"] / name).read_bytes()
    assert isinstance(source.ranges(name), LocalRanges)  # once it is here, it is read from here
    assert not list(tmp_path.rglob("*.partial"))


def test_copies_from_a_server_without_ranges(samples, web, monkeypatch):
    monkeypatch.setattr("flexor.data.storage.remote.LONGEST_REQUEST", 500)
    web.knows_ranges = False
    source = find_source(None, f"{web.address}/v3.0", None)
    [name] = source.list("videos", "000.mp4")
    assert source.local(name).read_bytes() == (samples["v3.0"] / name).read_bytes()


def test_a_failing_server_is_not_taken_for_missing_files(web, tmp_path):
    """fsspec says «not found» of any answer that is no success."""
    source = find_source(None, f"{web.address}/v3.0", None)
    assert not source.exists("videos/none.mp4")
    web.down = 2
    assert source.size("meta/info.json") > 0
    assert web.down == 0
    with pytest.raises(DatasetError, match=r"videos/none\.mp4 does not exist"):
        source.ranges("videos/none.mp4")


def test_block_cache_is_limited(samples, tmp_path, monkeypatch):
    import fsspec

    monkeypatch.setenv("FLEXOR_CACHE", str(tmp_path))
    fsspec.filesystem("memory").put(str(samples["v3.0"]), "/limited", recursive=True)
    for limit, blocks in ((0, 0), (1 << 30, 1)):
        source = find_source(None, "memory://limited", None, cache_bytes=limit)
        [name] = source.list("videos", "000.mp4")
        assert source.ranges(name).read(0, 10) == (samples["v3.0"] / name).read_bytes()[:10]
        assert len(list((tmp_path / "blocks").rglob("*-0"))) == blocks


def test_a_table_in_a_bucket_that_changes_is_copied_again(tmp_path, monkeypatch):
    """Also if its size is the same."""
    import fsspec

    monkeypatch.setenv("FLEXOR_CACHE", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    memory.pipe({"/changing/meta/info.json": b"{}", "/changing/data/a.parquet": b"first"})
    try:
        first = find_source(None, "memory://changing", None)
        assert first.local("data/a.parquet").read_bytes() == b"first"
        again = find_source(None, "memory://changing", None)
        assert again.here("data/a.parquet") is not None
        memory.pipe("/changing/data/a.parquet", b"other")
        changed = find_source(None, "memory://changing", None)
        assert changed.here("data/a.parquet") is None
        assert changed.local("data/a.parquet").read_bytes() == b"other"
        assert changed.here("data/a.parquet") is not None
    finally:
        memory.rm("/changing", recursive=True)
