"""What the loader says about its time: reading apart from decoding, and each frame counted where it came from."""

import os
import time

import pytest

from flexor.data.dataset import open_dataset
from flexor.data.loader.loader import Loader
from flexor.data.loader.open import open_loader
from flexor.data.loader.work_time import over_ranks
from flexor.data.settings import CacheConfig, DatasetConfig, OrderConfig
from flexor.data.storage.read_time import read_seconds, reading
from support.samples import write_sample

CAMERAS = ["observation.images.top", "observation.images.wrist"]
SLEEP = 0.02


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_sample(tmp_path_factory.mktemp("work") / "data")


def load(root, tier: str, threads: int) -> Loader:
    order = OrderConfig("uniform")
    settings = DatasetConfig(cache=CacheConfig(tier=tier, pool_gb=0.0001), order=order)
    return open_loader(
        open_dataset(root=root), settings, {}, cameras=CAMERAS, batch_size=4, num_workers=threads
    )


@pytest.mark.parametrize("threads", [0, 2])
def test_reading_apart_from_decoding(root, monkeypatch, threads):
    loader, real, slept = load(root, "stream", threads), os.pread, []

    def slow(*arguments):
        time.sleep(SLEEP)
        slept.append(SLEEP)
        return real(*arguments)

    monkeypatch.setattr(os, "pread", slow)
    assert loader.work()["frames_decoded"] == 0
    slept.clear()
    list(loader.steps(0, 8))
    work = loader.work()
    assert work["read_s"] >= sum(slept) > 0, "every wait for a file is reading"
    assert work["decode_s"] > 0 and work["assemble_s"] > 0 and work["decode_cpu_s"] > 0
    assert work["frames_decoded"] >= 8 * 4 * len(CAMERAS) > work["frames_cached"] == 0
    assert (work["threads"], work["source"], work["cache"]) == (threads, "disk", "none") and work["bytes"] > 0
    assert not any(value for name, value in loader.work().items() if name.endswith("_s")), (
        "since the last call"
    )
    both = over_ranks([work, work])
    assert both["read_s"] == pytest.approx(2 * work["read_s"], abs=1e-3) and both["threads"] == 2 * threads


def test_cached_frames_are_neither_read_nor_decoded(root):
    loader = load(root, "ram", 0)  # steps are planned one by one
    epoch = -(-len(loader.rows) // 4)
    steps = loader.steps(0, 4 * epoch)
    for _ in range(3 * epoch):
        next(steps)
    assert loader.work()["frames_decoded"] == len(loader.rows) * len(CAMERAS)
    for _ in range(epoch):
        next(steps)
    steps.close()
    work = loader.work()
    assert work["frames_decoded"] == work["read_s"] == 0 and work["assemble_s"] > 0 and work["cache"] == "ram"
    assert work["frames_cached"] == epoch * 4 * len(CAMERAS)
    assert loader.decoded_bytes == len(loader.dataset) * (48 * 64 + 24 * 32) * 3
    loader.close()


def test_reads_within_reads_count_once():
    before = read_seconds()
    with reading(), reading():
        time.sleep(0.01)
    assert read_seconds() > before
    with pytest.raises(ValueError), reading():
        raise ValueError
