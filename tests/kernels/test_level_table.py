"""Images become normalised floats in one pass on a GPU, with the bits of the operations that it replaces."""

import pytest
import torch

from flexor.kernels import level_table
from flexor.kernels.level_table import all_levels, as_table, can_look_up, look_up
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.processing import normalize
from flexor.policies.processing.normalize import Normalize
from flexor.policies.processing.pipeline import Pipeline
from flexor.policies.processing.rename_and_move import ToDevice

CAMERA = "observation.images.top"
STATS = {
    "mean": [0.4, 0.5, 0.6],
    "std": [0.2, 0.0, 0.3],  # a channel that never changes
    "min": [0.0, 0.1, 0.2],
    "max": [1.0, 0.1, 0.9],
}


def before_the_policy(mode: str, shape: tuple[int, ...], device: str) -> Pipeline:
    feature = PolicyFeature(Kind.VISUAL, shape)
    step = Normalize({CAMERA: feature}, {"VISUAL": mode}, {CAMERA: STATS})
    return Pipeline("before", [ToDevice(device), step])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 3, 480, 640), (5, 2, 3, 7, 9), (1, 3, 1, 1)], ids=str)
@pytest.mark.parametrize("mode", ["IDENTITY", "MEAN_STD", "MIN_MAX"])
def test_the_same_bits_as_operation_by_operation(mode, shape, monkeypatch):
    images = torch.randint(0, 256, shape, dtype=torch.uint8).cuda()
    before = before_the_policy(mode, shape[-3:], "cuda")
    processed = before({CAMERA: images})[CAMERA]
    again = before({CAMERA: images.mT.contiguous().mT})[CAMERA]  # in a layout that the kernel does not take
    monkeypatch.setattr(normalize, "can_look_up", lambda _: False)
    expected = before({CAMERA: images})[CAMERA]
    assert processed.dtype == torch.float32 and processed.isfinite().all()
    assert torch.equal(processed, expected) and torch.equal(again, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_level_of_every_channel(dtype):
    table = torch.randn(3, 256).to("cuda", dtype)
    images = torch.arange(256, dtype=torch.uint8).repeat(2, 3, 4, 1).cuda()
    assert torch.equal(look_up(images, table), table[:, None].expand(2, 3, 4, 256))


def test_a_plan_sees_the_shape_of_the_kernel():
    images = torch.empty((2, 5, 3, 8, 10), dtype=torch.uint8, device="meta")
    out = before_the_policy("MEAN_STD", (3, 8, 10), "meta")({CAMERA: images})[CAMERA]
    assert out.shape == images.shape and out.dtype == torch.float32 and can_look_up(images)


def test_a_table_has_a_row_for_each_channel():
    levels = all_levels(3, torch.device("cpu"))
    assert levels.shape == (256, 3, 1, 1) and levels.dtype == torch.uint8
    table = as_table(levels + torch.tensor([0.0, 1000, 2000]).view(3, 1, 1))
    assert torch.equal(table, torch.arange(256.0) + torch.tensor([[0.0], [1000], [2000]]))
    assert table.shape[1] == level_table.LEVELS


def test_without_a_gpu_nothing_is_looked_up():
    assert not can_look_up(torch.zeros((1, 3, 2, 2), dtype=torch.uint8))
