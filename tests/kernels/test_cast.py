"""The kernel that casts gradients into a bucket computes what torch's copy computes."""

import pytest
import torch

import flexor.kernels.cast  # noqa: F401 (defines the operator)


@pytest.mark.gpu
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 2047, 2048, 70_001])
def test_the_kernel_computes_what_copy_computes(source, count):
    values = torch.randn(count, device="cuda").to(source)
    values[0] = torch.nan
    target = torch.zeros(count + 4, device="cuda")
    torch.ops.flexor.cast_into(target[2:-2], values)
    assert torch.equal(target[3:-2], values[1:].float()) and target[2].isnan()
    assert not target[[0, 1, -2, -1]].any()
