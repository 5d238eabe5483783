"""Memory formats of convolutions on the meta device: what cuDNN does, by torch's rules."""

from __future__ import annotations

import pytest
import torch

from flexor.plan.trace.layouts import channels_last, with_layout
from flexor.plan.trace.ops import describe
from flexor.plan.trace.trace import trace_step
from flexor.plan.trace.workspaces import scratch
from support.plans import H200, settings

aten = torch.ops.aten
LAST = torch.channels_last
SETTINGS = (None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1)


def meta(*shape: int, last: bool = False) -> torch.Tensor:
    return torch.empty(shape, device="meta", memory_format=LAST if last else torch.contiguous_format)


def flat(x: torch.Tensor) -> torch.Tensor:
    """A channels-last tensor [B, C, 1, L] as [B, C, L]."""
    return torch.empty_strided(
        (x.shape[0], x.shape[1], x.shape[3]), (x.stride(0), x.stride(1), x.stride(3)), device="meta"
    )


@pytest.mark.parametrize("x", [False, True])
@pytest.mark.parametrize("weight", [False, True])
def test_one_of_the_two_decides(x: bool, weight: bool):
    args = (meta(2, 8, 16, 16, last=x), meta(4, 8, 3, 3, last=weight), *SETTINGS)
    out = with_layout(aten.convolution.default, args, aten.convolution.default(*args))
    assert out.shape == (2, 4, 8, 8) and channels_last(out) == (x or weight)
    back = (out, *args[:2], None, *SETTINGS[1:], [True, True, False])
    of_x, of_weight, _ = with_layout(
        aten.convolution_backward.default, back, aten.convolution_backward.default(*back)
    )
    assert (of_x.shape, of_weight.shape) == (args[0].shape, args[1].shape)
    assert channels_last(of_x) == channels_last(of_weight) == (x or weight)


def test_what_has_another_format_is_copied_for_the_kernel():
    x, weight, last = meta(2, 8, 16, 16), meta(4, 8, 3, 3, last=True), meta(2, 8, 16, 16, last=True)
    assert taken(x, weight) == 4 * x.numel()
    assert taken(last, weight) == 0
    assert taken(last, meta(4, 8, 3, 3)) == 4 * weight.numel()


def taken(x: torch.Tensor, weight: torch.Tensor) -> int:
    function, args = aten.convolution.default, (x, weight, *SETTINGS)
    out = with_layout(function, args, function(*args))
    return scratch(describe(function, args, [x, weight], [out], "forward"), args, [out])


def test_one_dimension_is_a_flat_image():
    x, weight = meta(2, 8, 32), flat(meta(4, 8, 1, 3, last=True))
    args = (x, weight, None, [1], [1], [1], False, [0], 1)
    out = with_layout(aten.convolution.default, args, aten.convolution.default(*args))
    assert out.shape == (2, 4, 32) and out.stride() == (4 * 32, 1, 4)
    assert taken_flat(x, weight, args, out) == 4 * x.numel()


def test_a_permuted_input_of_one_dimension_does_not_decide():
    x, weight = flat(meta(2, 8, 1, 32, last=True)), meta(4, 8, 3)
    args = (x, weight, None, [1], [1], [1], False, [0], 1)
    out = with_layout(aten.convolution.default, args, aten.convolution.default(*args))
    assert out.is_contiguous()
    last = flat(meta(4, 8, 1, 3, last=True))
    args = (x, last, *args[2:])
    assert taken_flat(x, last, args, out) == 2 * 4 * x.numel()  # contiguous, and back


def taken_flat(x, weight, args, out) -> int:
    op = describe(aten.convolution.default, args, [x, weight], [out], "forward")
    return scratch(op, args, [out])


def test_feature_maps_of_a_policy_have_the_format_of_its_weights():
    """cuDNN's copies of every feature map go away."""
    contiguous, channels_last = (
        trace_step(settings("act", channels_last=last, precision="bf16"), 4, H200) for last in (False, True)
    )
    copied = [
        sum(op.scratch for op in trace.ops if op.kind == "convolution" and op.phase == "forward")
        for trace in (contiguous, channels_last)
    ]
    assert copied[1] < 0.5 * copied[0]
