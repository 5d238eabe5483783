"""CLIP's activation function: as `transformers` has it, and the same in one kernel on a GPU."""

import pytest
import torch
from torch import Tensor

from flexor.kernels import quick_gelu as module
from flexor.kernels.quick_gelu import QuickGELU, plain

CLOSE = {
    torch.float32: 5e-6,
    torch.bfloat16: 8e-3,
    torch.float16: 1e-3,
}  # of the largest value, or 1


def with_gradient(function, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(gradient)
    assert x.grad is not None
    return y.detach(), x.grad


def test_it_is_the_one_of_transformers() -> None:
    activations = pytest.importorskip("transformers.activations")
    x = torch.linspace(-12, 12, 97)
    assert torch.equal(QuickGELU()(x), activations.QuickGELUActivation()(x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("shape", [(3, 5), (2, 197, 3072)])
def test_the_kernel_computes_the_same(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch) -> None:
    used = []
    apply = module._QuickGELU.apply
    monkeypatch.setattr(module._QuickGELU, "apply", lambda x: used.append(True) or apply(x))
    torch.manual_seed(0)
    x, gradient = ((4 * torch.randn(shape)).to("cuda", dtype) for _ in range(2))
    ours = with_gradient(QuickGELU(), x, gradient)
    exact = with_gradient(plain, x.double(), gradient.double())
    assert used
    for our, their in zip(ours, exact):
        assert our.dtype == dtype
        error = (our.double() - their).abs() / their.abs().clamp(min=1)
        assert error.max() < CLOSE[dtype]


@pytest.mark.gpu
def test_other_layouts_have_torch() -> None:
    x = torch.randn(4, 6, device="cuda").mT
    assert torch.equal(QuickGELU()(x), plain(x))
