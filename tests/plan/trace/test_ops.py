"""Operations of a step: their memory format, and Flexor's own kernels."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexor.plan.speed.measure import pair
from flexor.plan.trace.ops import UNALIGNED_ROWS, describe
from flexor.plan.trace.trace import OperationTracker

aten = torch.ops.aten


@pytest.fixture
def kernels() -> Iterator[Any]:
    """Two operators in Flexor's namespace."""
    library = torch.library.Library("flexor", "FRAGMENT")
    library.define("example_pool(Tensor x, Tensor scale) -> (Tensor, Tensor)")
    library.define("example_add_(Tensor(a!) x, Tensor y) -> ()")
    library.impl("example_pool", lambda x, scale: (x[..., ::2, ::2].clone(), x.new_empty(7)), "Meta")
    library.impl("example_add_", lambda x, y: None, "Meta")
    yield torch.ops.flexor
    library._destroy()


def test_own_kernels_are_described_by_their_tensors(kernels):
    x, scale = (torch.empty(shape, device="meta") for shape in ((2, 4, 8, 8), (4,)))
    with (tracker := OperationTracker("meta")):
        kernels.example_pool(x, scale)
        kernels.example_add_(x, x)
    pool, add = tracker.ops[-2:]
    assert (pool.name, pool.kind) == ("flexor::example_pool", "memory")
    assert (pool.read, pool.written) == (x.nbytes + scale.nbytes, x.nbytes // 4 + 7 * 4)
    assert (add.name, add.read, add.written) == ("flexor::example_add_", 2 * x.nbytes, x.nbytes)
    assert sum(event.kind == "alloc" for event in tracker.events) >= 2  # its results are memory


def event(name: str, shape: tuple[int, ...], microseconds: float, start: int) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        cpu_parent=None,
        device_type="DeviceType.CPU",
        time_range=SimpleNamespace(start=start),
        input_shapes=[shape],
        device_time_total=microseconds,
        kernels=[SimpleNamespace(duration=microseconds)],
        cpu_children=[],
    )


def test_own_kernels_are_paired_with_a_profile(kernels):
    x = torch.empty(2, 4, 8, 8, device="meta")
    with (tracker := OperationTracker("meta")):
        kernels.example_pool(x, x)
        torch.relu(x)
    events = [
        event("flexor::example_pool", (2, 4, 8, 8), 5, 0),
        event("other::relu", (2, 4, 8, 8), 7, 1),
        event("aten::relu", (2, 4, 8, 8), 2, 2),
    ]
    paired, share = pair(tracker.ops, events)
    assert {op.name: seconds for op, seconds in paired} == pytest.approx(
        {"flexor::example_pool": 5e-6, "relu": 2e-6}
    )
    assert share == pytest.approx(7 / 14)


@pytest.mark.parametrize(("last", "layout"), [(True, "nhwc"), (False, "")])
def test_operations_on_images_have_a_memory_format(last: bool, layout: str):
    format = torch.channels_last if last else torch.contiguous_format
    x = torch.empty((2, 8, 4, 4), device="meta", memory_format=format)
    weight = torch.empty((8, 8, 3, 3), device="meta", memory_format=format)
    settings = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    with (tracker := OperationTracker("meta")):
        torch.relu(aten.convolution(x, weight, *settings))
        aten.convolution(torch.empty((2, 8, 4, 4), device="meta"), weight, *settings)
        torch.empty((2, 8, 16), device="meta").transpose(1, 2).exp()
    by_name = [(op.name, op.layout) for op in tracker.ops if op.kind != "view"]
    copied = "to nhwc" if last else ""
    assert by_name == [("convolution", layout), ("relu", layout), ("convolution", copied), ("exp", "")]


def test_a_view_is_no_kernel():
    x = torch.empty(2, 3, device="meta")
    assert describe(aten.t.default, (x,), [x], [x.t()], "forward").kind == "view"


@pytest.mark.parametrize(
    "left, right, dtype, aligned",
    [
        ((100, 64), (64, 24), torch.bfloat16, True),
        ((100, 60), (60, 24), torch.bfloat16, False),
        ((100, 64), (64, 20), torch.bfloat16, False),
        ((100, 60), (60, 20), torch.float32, True),
    ],
)
def test_products_with_unaligned_rows_are_told_apart(left, right, dtype, aligned):
    a, b = (torch.empty(shape, dtype=dtype, device="meta") for shape in (left, right))
    op = describe(aten.mm.default, (a, b), (a, b), (a @ b,), "forward")
    assert (op.detail != UNALIGNED_ROWS) == aligned


def test_the_rows_of_a_transposed_factor_count():
    gradient, x = (torch.empty(99, width, dtype=torch.bfloat16, device="meta") for width in (60, 64))
    of_weight = describe(aten.mm.default, (gradient.t(), x), (gradient, x), (gradient.t() @ x,), "backward")
    assert (
        of_weight.detail == UNALIGNED_ROWS
    )  # although M, which is 60, is the length of no row of the result
    of_other = describe(aten.mm.default, (x.t(), x), (x, x), (x.t() @ x,), "backward")
    assert of_other.detail != UNALIGNED_ROWS
