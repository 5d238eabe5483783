"""Streaming over a network that misbehaves: the same batches as from a disk, nothing lost, nothing twice."""

import random
import threading

import pytest
import torch

from flexor.core.batch import SAMPLE_ID
from flexor.core.errors import SourceError
from flexor.data.dataset import open_dataset
from flexor.data.loader import loader as loader_module
from flexor.data.loader.open import open_loader
from flexor.data.settings import CacheConfig, DatasetConfig, OrderConfig
from flexor.data.storage import block_cache as blocks
from flexor.data.storage import ranges, remote
from support.file_server import FileServer
from support.samples import write_sample

pytest.importorskip("aiohttp")
CAMERAS = ["observation.images.top", "observation.images.wrist"]
STRIDE = {camera: [-6, -3, 0] for camera in CAMERAS}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_sample(tmp_path_factory.mktemp("remote") / "data")


@pytest.fixture
def server(root, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    for module in (blocks, ranges):  # the videos are small, and should still be read in many parts
        monkeypatch.setattr(module, "BLOCK", 512)
    monkeypatch.setattr(blocks, "MEMORY_BLOCKS", 2)
    with FileServer(root) as served:
        yield served


def load(root, deltas=None, remote_bytes=None):
    dataset = open_dataset(root=root, remote_bytes=remote_bytes)
    # the order depends on whether bytes stay here, unless it is settled
    order = OrderConfig("streaming", lanes=5, pool=4, unit=1)
    settings = DatasetConfig(on_bad_frame="skip", cache=CacheConfig(tier="stream"), order=order)
    return open_loader(dataset, settings, deltas or {}, cameras=CAMERAS, batch_size=5, num_workers=2, seed=3)


def same(first, second) -> bool:
    return all(torch.equal(first[0][key], second[0][key]) for key in [SAMPLE_ID, *CAMERAS])


@pytest.mark.parametrize("deltas", [{}, STRIDE], ids=["single", "stride"])
def test_the_same_batches_as_from_a_disk(server, root, deltas):
    expected = list(load(root, deltas).steps(0, 16))
    batches = list(load(server.address, deltas).steps(0, 16))
    assert all(same(a, b) for a, b in zip(expected, batches, strict=True))
    videos = [name for name in server.whole_files if name.endswith(".mp4")]
    assert videos == []  # read in parts


def test_faults_lose_and_repeat_nothing(server, root):
    expected = list(load(root).steps(0, 16))
    loader = load(server.address, remote_bytes=0)  # nothing stays: everything is fetched again and again
    chance = random.Random(0)
    batches = []
    for step in loader.steps(0, 16):
        batches.append(step)
        server.faults.extend(chance.choices([503, "drop", "short", None], k=3))
        server.latency = chance.choice([0, 0.01])
    assert all(same(a, b) for a, b in zip(expected, batches, strict=True))
    assert loader.counters()["bad_frames"] == 0


def test_a_server_that_is_gone_is_no_broken_frame_and_the_run_goes_on_later(server, root, monkeypatch):
    monkeypatch.setattr(remote, "ATTEMPTS", 2)
    monkeypatch.setattr(loader_module, "GROUP_SAMPLES", 1)  # steps are read one by one
    expected = list(load(root).steps(0, 16))
    loader = load(server.address, remote_bytes=0)
    batches = []
    with pytest.raises(SourceError, match="after 2 attempts"):
        for step in loader.steps(0, 16):
            batches.append(step)
            if len(batches) == 4:
                server.down = 10_000
    assert 4 <= len(batches) < 16
    server.down = 0
    batches += load(server.address).steps(len(batches), 16)
    assert all(same(a, b) for a, b in zip(expected, batches, strict=True))
    assert not [t for t in threading.enumerate() if t.name.startswith("loader")]
