"""Images on their way to a GPU: the right frames, whether decoded, cached in RAM or cached on the device."""

import shutil
from collections import Counter

import numpy as np
import pytest
import torch

from flexor.core.batch import SAMPLE_ID
from flexor.data.dataset import Dataset, open_dataset
from flexor.data.frames.gpu_cache import GPUFrameCache
from flexor.data.frames.slots import Pool
from flexor.data.frames.store import fill_cache
from flexor.data.loader.decoded_frames import DecodedFrames
from flexor.data.loader.loader import Loader
from flexor.data.loader.open import open_loader
from flexor.data.loader.step import StepGroup
from flexor.data.loader.step_frames import FrameFinder
from flexor.data.loader.to_gpu import Stager
from flexor.data.settings import CacheConfig, DatasetConfig
from flexor.data.video.on_device import rgb_on_device
from support.damage import overwrite_packets
from support.samples import write_sample

TOP, WRIST = "observation.images.top", "observation.images.wrist"
CPU = torch.device("cpu")
WINDOWS = {"single": {}, "window": {TOP: [-3, -1, 0], WRIST: [-1, 0]}}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_sample(tmp_path_factory.mktemp("to_gpu") / "data")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXOR_CACHE", str(tmp_path / "cache"))


def planes_of(dataset: Dataset, camera: str, ids: np.ndarray) -> torch.Tensor:
    """Decoded one by one. [n, nbytes]"""
    planes = np.empty((len(ids), dataset.store.format(camera).nbytes), np.uint8)
    for k, frame in enumerate(ids.tolist()):
        assert not dataset.store.decode(camera, np.array([frame]), lambda _, k=k: planes[k])
    return torch.from_numpy(planes)


def loader_of(root, tier: str, deltas: dict, **options) -> Loader:
    dataset = open_dataset(root=root)
    kind = "jpeg" if tier == "jpeg" else "raw"
    settings = DatasetConfig(
        cache=CacheConfig(tier="stream" if tier in ("stream", "gpu") else "ram", format=kind)
    )
    options = {"batch_size": 6, "seed": 7, "num_workers": 2, "device": None} | options
    loader = open_loader(dataset, settings, deltas, cameras=[TOP, WRIST], **options)
    if tier == "gpu":  # its memory is the host's here, the rest is the same
        store = dataset.store
        store.caches = {
            camera: GPUFrameCache(20, store.frames, store.format(camera).nbytes, CPU)
            for camera in (TOP, WRIST)
        }
        ids = np.arange(3, 20)  # the others stay out: they are decoded at every read
        for camera, cache in store.caches.items():
            cache.put(ids, list(planes_of(dataset, camera, ids)))
    return loader


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("tier", ["stream", "ram", "gpu"])
@pytest.mark.parametrize("windows", WINDOWS)
def test_every_image_is_that_of_its_frame(root, windows, tier, workers):
    deltas = WINDOWS[windows]
    loader = loader_of(root, tier, deltas, accumulation=2, num_workers=workers)
    plain = open_dataset(root=root)
    for step in loader.steps(0, 8):  # two and a half epochs
        for batch in step:
            rows = batch[SAMPLE_ID].numpy()
            which = plain.episode_of(rows)
            first, last = plain.episodes.start[which], plain.episodes.end[which] - 1
            for camera in (TOP, WRIST):
                window = np.clip(
                    rows[:, None] + np.array(deltas.get(camera, [0])), first[:, None], last[:, None]
                )
                planes = planes_of(plain, camera, window.ravel())
                expected = rgb_on_device(plain.store.format(camera), planes)
                images = batch[camera].on(CPU)
                assert images.shape[:-3] == (window.shape if camera in deltas else window.shape[:1])
                assert torch.equal(images.reshape(expected.shape), expected), (camera, tier)


def test_jpegs_are_decoded_by_several_threads(root):
    loader = loader_of(root, "jpeg", {}, batch_size=38)
    (raw,), (decoded,) = loader.steps(0, 2)
    raw, decoded = (batch[TOP].on(CPU)[batch[SAMPLE_ID].argsort()].float() for batch in (raw, decoded))
    assert not torch.equal(raw, decoded) and (raw - decoded).abs().mean() < 3


def nothing_decoded(store) -> DecodedFrames:
    return DecodedFrames(store, Pool(0), [TOP])


@pytest.mark.parametrize("tier", ["ram", "gpu"])
def test_a_frame_is_staged_once_however_often_it_is_read(root, tier):
    loader = loader_of(root, tier, WINDOWS["window"])
    store = loader.dataset.store
    fill_cache(store, [TOP, WRIST], np.arange(3, 20), 1)
    ids = np.array([[3, 5, 6], [3, 3, 4], [6, 8, 9]])
    _, (shots,) = FrameFinder(store, nothing_decoded(store), "raise", Counter()).find(
        StepGroup(0, range(1), np.arange(3), {TOP: ids}, np.full(3, -1), slots={TOP: np.full_like(ids, -1)})
    )
    (staged,), jobs = Stager(store, None, jobs=4).stage(shots, 3)
    for job in jobs:
        job()
    assert shots.all_cached
    assert len(staged.host if tier == "ram" else staged.cached_rows) == 6
    planes = planes_of(loader.dataset, TOP, ids.ravel())
    assert torch.equal(staged.on(CPU).flatten(0, 1), rgb_on_device(store.format(TOP), planes))


def test_samples_that_replace_bad_ones_bring_their_own_frames(root, tmp_path):
    """Nothing is cached, although the step waited for it: its frames are decoded now, and one of them is bad."""
    copy = shutil.copytree(root, tmp_path / "broken")
    video = sorted(copy.glob(f"videos/{TOP}/**/*.mp4"))[0]
    overwrite_packets(video, range(5, 8))

    store, counters = open_dataset(root=copy).store, Counter()
    step = StepGroup(
        0,
        range(1),
        np.arange(3),
        {TOP: np.array([[0], [6], [30]])},
        np.full(3, -1),
        waits=True,
        slots={TOP: np.full((3, 1), -1)},
    )
    order, (shots,) = FrameFinder(store, nothing_decoded(store), "skip", counters).find(step)
    assert order.tolist() == [0, 2, 2] and counters["skipped_samples"] == 1
    planes = torch.stack([torch.as_tensor(shots.planes(store, i, 0)) for i in range(3)])
    assert torch.equal(planes, planes_of(open_dataset(root=root), TOP, np.array([0, 30, 30])))


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["stream", "ram", "gpu"])
@pytest.mark.parametrize("windows", WINDOWS)
def test_batches_on_a_gpu(root, windows, tier):
    """Images and columns arrive. Once frames are cached, nothing waits for the GPU on the way."""
    deltas, device = {"action": [0, 1, 2], **WINDOWS[windows]}, torch.device("cuda", 0)
    dataset, plain = open_dataset(root=root), open_dataset(root=root)
    settings = DatasetConfig(cache=CacheConfig(tier=tier), decoder="cpu")
    loader = open_loader(
        dataset,
        settings,
        deltas,
        cameras=[TOP, WRIST],
        batch_size=6,
        seed=7,
        num_workers=2,
        device=device,
    )
    assert loader.tier == tier
    steps = loader.steps(0, 24)
    for number in range(24):
        torch.cuda.set_sync_debug_mode("error" if tier != "stream" and number >= 12 else "default")
        try:
            (batch,) = next(steps)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        columns = plain.read(batch[SAMPLE_ID].cpu().numpy(), deltas, [TOP, WRIST])
        for name, column in columns.items():
            if name in (TOP, WRIST):
                near = (batch[name].cpu().int() - torch.from_numpy(column).int()).abs() <= 1
                assert near.all(), (number, name)
            elif isinstance(column, np.ndarray) and column.dtype != object:
                assert batch[name].is_cuda
                assert torch.equal(batch[name].cpu(), torch.from_numpy(column)), name
    loader.close()
