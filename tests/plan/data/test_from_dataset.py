"""What planning takes from a dataset is what the loader finds in it."""

from pathlib import Path

import numpy as np
import pytest

from flexor.data.dataset import open_dataset
from flexor.data.format.writer import DatasetWriter
from flexor.data.loader.loader import Loader, prefetched_groups
from flexor.data.settings import CacheConfig
from flexor.plan.data.from_dataset import facts_of
from flexor.plan.data.host import PICTURES, Loading, steps_in_memory


@pytest.mark.parametrize("batch", [2, 4096])
def test_facts_are_the_loaders(dataset: Path, batch: int) -> None:
    opened = open_dataset(root=dataset)
    deltas = {camera: [-1, 0] for camera in opened.cameras[:1]}
    data = facts_of(opened, opened.cameras, deltas)
    assert data.frames == len(opened)
    assert [camera.steps for camera in data.cameras] == [2] + [1] * (len(opened.cameras) - 1)
    for camera, name in zip(data.cameras, opened.cameras):
        assert camera.frame_bytes() == opened.store.format(name).nbytes
    loader = Loader(opened, deltas, batch_size=batch, device=None)
    grouped = loader.grouped
    waiting = prefetched_groups(grouped * loader._step_bytes)
    assert steps_in_memory(data, Loading(batch)) == grouped * (1 + waiting)
    assert data.row_bytes * len(opened) == pytest.approx(
        sum(c.nbytes for c in opened.columns.values()), rel=0.01
    )
    assert data.file_bytes == opened.video_bytes > 0


def test_scaled_pictures(dataset: Path) -> None:
    opened = open_dataset(root=dataset, size=(16, 16))
    data = facts_of(opened, opened.cameras, {})
    assert data.cameras[0].height == 32  # what is decoded
    assert data.cameras[0].frame_bytes() == opened.store.format(opened.cameras[0]).nbytes == 16 * 16 * 3
    assert data.scaled(CacheConfig(size="16x16")).bytes_per_row() == data.bytes_per_row()


def test_without_cameras(lowdim: Path) -> None:
    data = facts_of(open_dataset(root=lowdim), [], {})
    assert data.cameras == () and data.bytes_per_row() == 0 and data.row_bytes > 0


def test_videos_and_single_pictures(tmp_path: Path) -> None:
    axes = ["height", "width", "channels"]
    features = {
        "observation.images.top": {"dtype": "video", "shape": (32, 48, 3), "names": axes},
        "observation.images.still": {"dtype": "image", "shape": (32, 48, 3), "names": axes},
        "action": {"dtype": "float32", "shape": (2,), "names": ["u", "v"]},
    }
    with DatasetWriter(tmp_path / "both", 10, features, codec="h264", pix_fmt="yuv420p", gop=4) as writer:
        for number in range(12):
            picture = np.full((32, 48, 3), 10 * number, np.uint8)
            action = np.zeros(2, np.float32)
            writer.add_frame({"action": action, **dict.fromkeys(list(features)[:2], picture)})
        writer.save_episode("push")
    opened = open_dataset(root=tmp_path / "both")
    top, still = facts_of(opened, list(features)[:2], {}).cameras
    assert (top.codec, top.gop, top.frame_bytes()) == ("h264", 4, 32 * 48 * 3 // 2)
    assert (still.codec, still.gop, still.frame_bytes()) == (PICTURES, 1, 32 * 48 * 3)
