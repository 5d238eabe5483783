"""Features of frames: stored like frames, listed and pruned with them, and read by the loader instead of images."""

import json

import numpy as np
import pytest
import torch

from flexor.cli.main import main
from flexor.core.batch import IMAGE_FEATURES, SAMPLE_ID
from flexor.core.errors import DatasetError
from flexor.data.dataset import open_dataset
from flexor.data.format.windows import window_rows
from flexor.data.frames import cache_folders
from flexor.data.frames.cache_folders import CacheKey, list_caches
from flexor.data.frames.features import FeatureFormat, FeatureStore
from flexor.data.frames.gpu_cache import GPUFrameCache
from flexor.data.loader.open import open_loader
from flexor.data.loader.open_features import (
    FeaturePlan,
    NoRoom,
    feature_keys,
    open_feature_caches,
    pick_feature_tier,
)
from flexor.data.settings import CacheConfig, DatasetConfig
from support.samples import write_sample

TOP, WRIST = "observation.images.top", "observation.images.wrist"
CPU = torch.device("cpu")
FORMATS = {
    TOP: FeatureFormat((3, 4), torch.bfloat16, f"{IMAGE_FEATURES}{TOP}"),
    WRIST: FeatureFormat((5,), torch.float32, f"{IMAGE_FEATURES}observation.images.hand"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_sample(tmp_path_factory.mktemp("features") / "data")


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(cache_folders, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setenv("FLEXOR_CACHE", str(tmp_path / "cache"))


def features_of(camera: str, ids: np.ndarray) -> torch.Tensor:
    """They follow from the id. [n, ...]"""
    format = FORMATS[camera]
    first = torch.as_tensor(ids, dtype=torch.float32).view(-1, *[1] * len(format.shape))
    steps = torch.arange(format.nbytes // format.dtype.itemsize).view(format.shape)
    return (first + steps / 8 + 100 * (camera == WRIST)).to(format.dtype)


def plan_of(dataset, digest="made by an encoder") -> FeaturePlan:
    return FeaturePlan(FORMATS, feature_keys(dataset, [TOP, WRIST], digest), len(dataset))


def store_of(dataset, tier="ram", skip=()) -> FeatureStore:
    """The features of all frames but some."""
    store = dataset.store
    if tier == "gpu":  # its memory is the host's here, the rest is the same
        caches = {c: GPUFrameCache(len(dataset), store.frames, f.nbytes, CPU) for c, f in FORMATS.items()}
    else:
        caches = open_feature_caches(plan_of(dataset), CacheConfig(), tier, store.frames, CPU, 1)
    features = FeatureStore(store, FORMATS, caches)
    ids = np.setdiff1d(dataset.frame_ids(np.arange(len(dataset))), skip)
    for camera, cache in caches.items():
        rows = FORMATS[camera].rows(features_of(camera, ids))
        cache.put(ids, list(rows) if tier == "gpu" else rows.numpy())
    return features


def loader_of(dataset, store, deltas, *, on_bad_frame="skip", **options):
    settings = DatasetConfig(cache=CacheConfig(tier="ram"), on_bad_frame=on_bad_frame)
    options = {"batch_size": 6, "seed": 7, "num_workers": 2, "device": "cpu"} | options
    loader = open_loader(dataset, settings, deltas, cameras=[TOP, WRIST], reads_frames=False, **options)
    loader.read_features(store, "ram")
    return loader


def on_cpu(value):
    return value if isinstance(value, torch.Tensor) else value.on(CPU)


@pytest.mark.parametrize("device", ["cpu", None])
@pytest.mark.parametrize("tier", ["ram", "disk", "gpu"])
@pytest.mark.parametrize("deltas", [{}, {TOP: [-3, -1, 0], WRIST: [-1, 0]}], ids=["single", "window"])
def test_batches_have_the_features_of_their_frames(root, tier, deltas, device):
    """Without a device they are on their way to one."""
    dataset = open_dataset(root=root)
    loader = loader_of(dataset, store_of(dataset, tier), deltas, device=device, accumulation=2)
    for step in loader.steps(0, 7):
        for batch in step:
            assert not {TOP, WRIST} & batch.keys()
            rows = batch[SAMPLE_ID].numpy()
            episode = dataset.episode_of(rows)
            ends = dataset.episodes.start[episode], dataset.episodes.end[episode]
            for camera, format in FORMATS.items():
                window, _ = window_rows(rows, deltas.get(camera, [0]), *ends)
                expected = features_of(camera, dataset.frame_ids(window.ravel()))
                expected = expected.view(*window.shape, *format.shape)
                found = on_cpu(batch[format.name])
                assert torch.equal(found, expected if camera in deltas else expected[:, 0])
    assert loader.counters()["decoded"] == 0
    loader.close()


def test_the_order_is_that_of_a_run_that_reads_images(root):
    dataset = open_dataset(root=root)
    loader = loader_of(dataset, store_of(dataset), {})
    images = open_loader(
        dataset,
        DatasetConfig(cache=CacheConfig(tier="ram")),
        {},
        cameras=[TOP, WRIST],
        batch_size=6,
        seed=7,
        num_workers=2,
    )
    for mine, theirs in zip(loader.steps(0, 5), images.steps(0, 5), strict=True):
        assert torch.equal(mine[0][SAMPLE_ID], theirs[0][SAMPLE_ID])
    images.close()
    loader.close()


def test_frames_that_will_be_read(root):
    dataset = open_dataset(root=root)
    loader = loader_of(dataset, store_of(dataset), {TOP: [-2, 0]})
    read = loader.frames_read(1, 3)
    rows = np.concatenate([step[0][SAMPLE_ID].numpy() for step in loader.steps(1, 3)])
    episode = dataset.episode_of(rows)
    window, _ = window_rows(rows, [-2, 0], dataset.episodes.start[episode], dataset.episodes.end[episode])
    assert read[TOP].tolist() == sorted({*dataset.frame_ids(window.ravel()).tolist()})
    assert read[WRIST].tolist() == sorted({*dataset.frame_ids(rows).tolist()})
    everything = loader.frames_read(0, 100)
    assert all(np.array_equal(ids, dataset.frame_ids(np.arange(len(dataset)))) for ids in everything.values())
    loader.close()


BAD = 7


@pytest.mark.parametrize("tier", ["ram", "gpu"])
@pytest.mark.parametrize("device", ["cpu", None])
def test_a_frame_that_can_not_be_decoded_is_as_bad_as_without_features(root, tier, device, log_lines):
    dataset = open_dataset(root=root)
    store = store_of(dataset, tier, skip=[BAD])
    store.bad[TOP][BAD] = store.bad[WRIST][BAD] = "it is damaged"
    every = dataset.frame_ids(np.arange(len(dataset)))

    def epoch(on_bad_frame):
        loader = loader_of(dataset, store, {}, on_bad_frame=on_bad_frame, device=device, batch_size=4)
        rows, values = [], []
        for step in loader.steps(0, len(dataset) // 4):
            rows += step[0][SAMPLE_ID].tolist()
            values += on_cpu(step[0][FORMATS[WRIST].name])[:, 0].sub(100).int().tolist()
        return dataset.frame_ids(np.array(rows)).tolist(), values, loader

    frames, values, loader = epoch("skip")
    assert frames == values and BAD not in frames and BAD in every
    assert loader.problem_counts()["skipped_samples"] == 1
    frames, values, loader = epoch("nearest")
    assert BAD in frames and values[frames.index(BAD)] in (BAD - 1, BAD + 1)
    assert loader.problem_counts()["substituted_samples"] == 1
    with pytest.raises(DatasetError, match=r"it is damaged.*on_bad_frame=skip"):
        epoch("raise")
    store.repeats.tell(last=True)
    assert "it is damaged" in " ".join(log_lines)


def test_damaged_features_end_the_run_and_are_computed_again(root):
    dataset = open_dataset(root=root)
    store = store_of(dataset, "disk")
    (info,) = (info for info in list_caches() if info.camera == TOP)
    for cache in store.caches.values():
        cache.close()
    with (info.folder / "data").open("r+b") as file:
        file.seek(5 * FORMATS[TOP].nbytes + 3)
        file.write(b"?")
    caches = open_feature_caches(plan_of(dataset), CacheConfig(), "disk", dataset.store.frames, CPU, 1)
    loader = loader_of(dataset, FeatureStore(dataset.store, FORMATS, caches), {}, on_bad_frame="raise")
    with pytest.raises(DatasetError, match="frame 5: the features of its images are damaged: resume the run"):
        for _ in loader.steps(0, 20):
            pass
    assert not caches[TOP].has(np.array([5])).any()
    loader.close()


def test_listed_and_pruned_with_the_frames(root, capsys):
    dataset = open_dataset(root=root)
    for cache in store_of(dataset, "disk").caches.values():
        cache.close()
    assert main(["data", "cache", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if TOP in line and " features " in line]
    assert main(["data", "cache", "--list", "--json"]) == 0
    assert [cache["features"] for cache in json.loads(capsys.readouterr().out)["caches"]] == [True, True]
    assert main(["data", "cache", "--prune", "--all"]) == 0
    assert not list_caches()


def test_other_features_are_another_cache(root):
    dataset = open_dataset(root=root)
    keys = [feature_keys(dataset, [TOP], digest)[TOP] for digest in ("one", "another")]
    frames = CacheKey(keys[0].fingerprint, TOP, keys[0].size)
    assert len({key.folder_name for key in [*keys, frames]}) == 3


def test_the_tier_with_enough_room(root):
    dataset = open_dataset(root=root)
    plan = plan_of(dataset)
    need = plan.nbytes / 1e9
    assert need == len(dataset) * (24 + 20) / 1e9
    assert pick_feature_tier(plan, CacheConfig(gb=2 * need), CPU) == "ram"
    assert pick_feature_tier(plan, CacheConfig(tier="disk", gb=2 * need), CPU) == "disk"
    assert pick_feature_tier(plan, CacheConfig(features="disk", gb=0), CPU) == "disk"
    with pytest.raises(NoRoom, match=r"they take .* and the budget is .* in memory and .* on disk"):
        pick_feature_tier(plan, CacheConfig(gb=need / 2), CPU)
    for cache in store_of(dataset, "disk").caches.values():
        cache.close()
    assert pick_feature_tier(plan, CacheConfig(gb=need / 2), CPU) == "disk"  # an earlier run left them
    with pytest.raises(NoRoom, match="has no room"):
        open_feature_caches(
            plan_of(dataset, "other"), CacheConfig(gb=need / 2, features="disk"), "disk", 9, CPU, 1
        )
