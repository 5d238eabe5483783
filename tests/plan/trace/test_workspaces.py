"""Memory that kernels take while they work: what torch's allocator counted on an H200 (torch 2.11, CUDA 13)."""

from __future__ import annotations

import pytest
import torch

from flexor.plan.trace.ops import Op, describe
from flexor.plan.trace.trace import trace_step
from flexor.plan.trace.traces import Traces
from flexor.plan.trace.workspaces import scratch
from support.plans import H200, settings

aten = torch.ops.aten
HALF = torch.bfloat16


def scratch_of(function, *args) -> int:
    outs = function(*args)
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    flat = [x for arg in args for x in (arg if isinstance(arg, list) else [arg])]
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    op: Op = describe(function, args, tensors, [x for x in outs if x is not None], "forward")
    return scratch(op, args, outs)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "taken"),
    [
        (816, 3200, torch.float32, 0),
        (1280, 64, torch.float32, 0),
        (1280, 14, torch.float32, 0),
        (1088, 512, torch.float32, 4456960),
        (1280, 512, HALF, 5243392),
        (1792, 2240, torch.float32, 32113152),
        (4352, 1536, torch.float32, 53477888),
        (4816, 3200, torch.float32, 124518912),
        (6400, 3200, HALF, 139264512),
        (19264, 512, torch.float32, 78905856),
        (19264, 3200, torch.float32, 139264512),
    ],
)
def test_sums_over_many_rows(rows: int, columns: int, dtype: torch.dtype, taken: int):
    counters = 512 if taken else 0  # of blocks that are done
    assert scratch_of(aten.sum.dim_IntList, meta(rows, columns, dtype=dtype), [0], True) + counters == taken


def test_sums_along_rows_take_nothing():
    assert scratch_of(aten.sum.dim_IntList, meta(19264, 3200), [1], True) == 0
    assert scratch_of(aten.sum.dim_IntList, meta(32, 602, 512), [0], True) == 0
    assert scratch_of(aten.sum.default, meta(19264, 3200)) == 0


@pytest.mark.parametrize(
    ("x", "weight", "stride", "pad", "dtype", "taken"),
    [
        ((16, 3, 480, 640), (64, 3, 7, 7), 2, 3, torch.float32, 373593088),
        ((16, 3, 480, 640), (64, 3, 7, 7), 2, 3, HALF, 235980288),
        ((1280, 3, 84, 84), (32, 3, 7, 7), 2, 0, HALF, 269132800),
        ((1280, 64, 21, 21), (64, 64, 3, 3), 1, 1, torch.float32, 289161728),
        ((64, 256, 15, 20), (256, 256, 3, 3), 1, 1, HALF, 20840960),
        ((16, 64, 120, 160), (128, 64, 1, 1), 2, 0, torch.float32, 0),
        ((64, 512, 15, 20), (512, 512, 1, 1), 1, 0, torch.float32, 512),
        ((64, 128, 60, 80), (256, 128, 1, 1), 2, 0, torch.float32, 235930112),
    ],
)
def test_convolutions(x, weight, stride: int, pad: int, dtype: torch.dtype, taken: int):
    args = (meta(*x, dtype=dtype), meta(*weight, dtype=dtype), None, [stride] * 2, [pad] * 2, [1, 1])
    nbytes = scratch_of(aten.convolution.default, *args, False, [0, 0], 1)
    assert nbytes == pytest.approx(taken, rel=2e-3, abs=1024)


@pytest.mark.parametrize(
    ("y", "x", "weight", "stride", "pad", "dtype", "taken"),
    [
        ((16, 64, 240, 320), (16, 3, 480, 640), (64, 3, 7, 7), 2, 3, torch.float32, 396176896),
        ((16, 64, 240, 320), (16, 3, 480, 640), (64, 3, 7, 7), 2, 3, HALF, 242001408),
        ((1280, 64, 21, 21), (1280, 64, 21, 21), (64, 64, 3, 3), 1, 1, torch.float32, 291226624),
        ((64, 128, 60, 80), (64, 128, 60, 80), (128, 128, 3, 3), 1, 1, torch.float32, 323421184),
        ((64, 512, 15, 20), (64, 512, 15, 20), (512, 512, 3, 3), 1, 1, torch.float32, 96732160),
        ((24, 2048, 16), (24, 2048, 16), (2048, 2048, 5), 1, 2, torch.float32, 90169856),
    ],
)
def test_gradients_of_convolutions(y, x, weight, stride: int, pad: int, dtype: torch.dtype, taken: int):
    tensors = (meta(*shape, dtype=dtype) for shape in (y, x, weight))
    dims = len(x) - 2
    places = (None, [stride] * dims, [pad] * dims, [1] * dims, False, [0] * dims, 1, [True, True, False])
    nbytes = scratch_of(aten.convolution_backward.default, *tensors, *places)
    assert nbytes == pytest.approx(taken, rel=0.03, abs=9 << 20)  # in how many parts, cuDNN decides


def test_pictures_that_are_not_contiguous_are_copied_first():
    window = meta(256, 6, 3, 84, 84)[:, 0]
    args = (meta(32, 3, 7, 7), None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1)
    assert scratch_of(aten.convolution.default, window, *args) == pytest.approx(93211136, abs=1024)


def test_indices_of_different_shapes_are_copied():
    index = [
        torch.zeros(shape, dtype=torch.int64, device="meta")
        for shape in ((256, 1, 1), (256, 84, 1), (256, 1, 84))
    ]
    pictures = meta(256, 1, 3, 92, 92)
    assert scratch_of(aten.index.Tensor, pictures, [index[0], None, None, index[1], index[2]]) == 43352064
    assert scratch_of(aten.index.Tensor, pictures, [index[0].flatten()]) == 0


def test_what_sums_take_is_not_stretched():
    """It begins with a certain number of rows, and has an end."""
    config = settings(policy={"dim_model": 64, "dim_feedforward": 256})
    batch = 700  # rows of decoded queries: 10 of each sample
    scaled, traced = Traces(config).at(batch, 1, H200), trace_step(config, batch, H200)

    def sums(trace):
        return [event.nbytes for event in trace.events if event.kind == "scratch"]

    assert sums(scaled) == sums(traced) and max(sums(traced)) > 0
    assert any(op.scratch for op in traced.ops if op.name == "sum")
