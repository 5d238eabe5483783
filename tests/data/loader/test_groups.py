"""Steps that are loaded together are those that are loaded one by one: the same bits, and each error at its step."""

import shutil

import numpy as np
import pytest
import torch

from flexor.core.batch import ACTION, VALID_STEPS, Batch
from flexor.core.errors import FlexorError
from flexor.data.dataset import open_dataset
from flexor.data.loader import loader as module
from flexor.data.loader.loader import Loader, steps_of_group
from flexor.data.loader.open import open_loader
from flexor.data.loader.step_groups import StepGroups
from flexor.data.settings import CacheConfig, DatasetConfig, OrderConfig
from support.damage import overwrite_packets

CAMERA = "observation.image"
WINDOWS = {"single": {}, "windows": {CAMERA: [-2, 0], ACTION: [0, 1, 2]}}


def load(root, cache: str, order: str, windows: str, **options) -> Loader:
    order_config = OrderConfig(order, lanes=3, pool=5, unit=1) if order == "streaming" else OrderConfig(order)
    settings = DatasetConfig(cache=CacheConfig(tier=cache), order=order_config, on_bad_frame="skip")
    return open_loader(
        open_dataset(root=root), settings, WINDOWS[windows], cameras=[CAMERA], seed=3, **options
    )


def same(batch: Batch, other: Batch) -> bool:
    assert batch.keys() == other.keys()
    return all(
        torch.equal(v, other[k]) if isinstance(v, torch.Tensor) else v == other[k] for k, v in batch.items()
    )


@pytest.mark.parametrize("most", [1, 2, 3, 8, 11])
@pytest.mark.parametrize("steps", [range(0), range(1), range(5, 7), range(3, 90)])
def test_groups_become_larger_and_leave_no_step_out(steps, most):
    groups = StepGroups(steps, most)
    parts = [groups.of(number) for number in range(groups.count)]
    assert [step for part in parts for step in part] == list(steps)
    numbers = [number for number, part in enumerate(parts) for _ in part]
    assert groups.number_of(np.array(steps, int)).tolist() == numbers
    assert [len(part) for part in parts][:1] in ([], [1]) and all(0 < len(part) <= most for part in parts)
    assert not groups.of(groups.count)
    if len(steps) > 80:
        assert len(parts[-2]) == most
        outside = groups.number_of(np.array([steps.start - 1, steps.start - 1000, steps.stop + 1000]))
        assert (outside[:2] < 0).all() and outside[2] >= groups.count


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize(
    ("cache", "order"), [("stream", "streaming"), ("stream", "uniform"), ("ram", "auto")]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_are_the_steps_one_by_one(cache, order, windows, ranks, dataset, monkeypatch):
    """Over more than an epoch, from a step in the middle of a group to one in the middle of another."""
    shape = {"batch_size": 3, "accumulation": 2, "num_workers": 2, "world_size": ranks, "rank": ranks - 1}
    steps = list(load(dataset, cache, order, windows, **shape).steps(5, 41))
    monkeypatch.setattr(module, "GROUP_SAMPLES", 1)
    loader = load(dataset, cache, order, windows, **shape)
    alone = list(loader.steps(5, 41))
    assert loader.grouped == 1 and len(steps) == len(alone) == 36
    for step, expected in zip(steps, alone):
        assert len(step) == len(expected) == 2
        assert all(same(a, b) for a, b in zip(step, expected)) and (ACTION in step[0])
        assert step[0].get(VALID_STEPS) == expected[0].get(VALID_STEPS)
        assert (VALID_STEPS in step[0]) == (windows == "windows")


def test_a_sample_is_replaced_by_one_of_its_own_step(dataset, tmp_path, monkeypatch):
    copy = shutil.copytree(dataset, tmp_path / "broken")
    video = sorted(copy.glob("videos/**/*.mp4"))[0]
    overwrite_packets(video, range(5, 20))
    grouped = list(load(copy, "stream", "uniform", "single", batch_size=4).steps(0, 30))
    monkeypatch.setattr(module, "GROUP_SAMPLES", 1)
    loader = load(copy, "stream", "uniform", "single", batch_size=4)
    assert all(same(a[0], b[0]) for a, b in zip(grouped, loader.steps(0, 30), strict=True))
    assert loader.counters()["skipped_samples"] > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_before_an_error_come_first(dataset, workers):
    def process(batch: Batch, step: int) -> Batch:
        if step == 6:
            raise FlexorError("no words")
        return batch

    class Steps:
        uses_images = False
        __call__ = staticmethod(process)

    loader = load(
        dataset, "stream", "uniform", "single", batch_size=2, num_workers=workers, host_steps=Steps()
    )
    count = 0
    with pytest.raises(FlexorError, match="no words"):
        for _ in loader.steps(2, 20):
            count += 1
    assert count == 4


def test_groups_are_small_where_steps_or_images_are_large():
    assert steps_of_group(8, 8 * 96 * 96 * 3) == 128
    assert steps_of_group(1300, 1) == 1
    assert steps_of_group(8, 1 << 30) == 1
    assert steps_of_group(1, 1, limit=0) == 1
