"""Weights in 8 and 4 bits: their codes, layers that compute with them, and the kernel."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.kernels import dequantize as module
from flexor.kernels.dequantize import dequantize
from flexor.policies.adapters import LoraConfig, LoraLinear
from flexor.policies.quantized import QuantizedLinear, QuantizedLoraLinear, nf4_levels, quantized

# of the paper's table, rounded
NF4 = [-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0]
NF4 += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1]
ERROR = {8: 0.008, 4: 0.12}  # of normally distributed weights, relative to their norm


def restored(weight: Tensor, bits: int) -> Tensor:
    codes, scales = quantized(weight, bits)
    return dequantize(codes, scales, nf4_levels().to(weight.device), *weight.shape, torch.float32)


def layer_of(bits: int, bias: bool = True, rank: int = 0) -> QuantizedLinear:
    layer: nn.Linear = nn.Linear(128, 24, bias=bias).requires_grad_(False)
    if rank:
        layer.__class__ = LoraLinear
        layer.adapt(LoraConfig(r=rank), 3)
        nn.init.normal_(layer.lora_B)
    layer.__class__ = QuantizedLoraLinear if rank else QuantizedLinear
    layer.quantize(bits)
    return layer


def test_levels_are_those_of_the_paper() -> None:
    assert nf4_levels().tolist() == pytest.approx(NF4, abs=1e-4)


@pytest.mark.parametrize("bits", ERROR)
def test_weights_are_restored(bits: int) -> None:
    torch.manual_seed(0)
    weight = 0.02 * torch.randn(32, 192)
    weight[3] = 0  # whole blocks without a scale
    error = (restored(weight, bits) - weight).norm() / weight.norm()
    assert 0 < error < ERROR[bits]
    assert torch.equal(restored(restored(weight, bits), bits), restored(weight, bits))
    assert not restored(weight, bits)[3].any()


@pytest.mark.parametrize("bits", ERROR)
def test_levels_are_exact(bits: int) -> None:
    values = nf4_levels().repeat(8) if bits == 4 else torch.linspace(-127, 127, 128).round() / 127
    weight = torch.stack((3 * values, 0.1 * values.flip(0)))
    assert torch.allclose(restored(weight, bits), weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", ERROR)
@pytest.mark.parametrize("rank", [0, 4])
def test_a_layer_computes_with_the_restored_weights(bits: int, rank: int) -> None:
    torch.manual_seed(0)
    layer = layer_of(bits, rank=rank)
    weight = dequantize(layer.weight, layer.weight_scales, layer.weight_levels, 24, 128, torch.float32)
    x = torch.randn(5, 7, 128, requires_grad=True)
    y = layer(x)
    plain = F.linear(x, weight, layer.bias)
    if rank:
        plain = plain + layer.scale * F.linear(F.linear(x, layer.lora_A), layer.lora_B)
    assert torch.allclose(y, plain, atol=1e-5)
    gradient = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(each, x, gradient)[0] for each in (y, plain))
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_autocast_decides_the_type() -> None:
    layer, x = layer_of(4, bias=False), torch.randn(2, 128)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer(x).dtype == torch.float32


def test_the_backward_pass_keeps_codes_only() -> None:
    layer, kept = layer_of(4), []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(torch.randn(2, 128, requires_grad=True))
    assert max(tensor.nbytes for tensor in kept) == layer.weight.nbytes == 24 * 128 // 2


@pytest.mark.gpu
@pytest.mark.parametrize("bits", ERROR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_restores_the_same(bits: int, dtype: torch.dtype, monkeypatch) -> None:
    weight = torch.randn(100, 2112, device="cuda")
    arguments = *quantized(weight, bits), nf4_levels().cuda(), *weight.shape, dtype
    ours = dequantize(*arguments)
    monkeypatch.setattr(module, "has_kernels", lambda _: False)
    assert torch.equal(ours, dequantize(*arguments))
