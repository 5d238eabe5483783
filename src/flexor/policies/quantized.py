"""Frozen weights of linear layers in 8 or 4 bits, as in QLoRA (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314).

64 neighbouring weights are a block with a scale, its largest magnitude. 8 bits are 255 equal steps. 4 bits are the 16
levels of NF4: quantiles of the normal distribution, so that weights use all levels equally often. A layer computes
with its weights in the type of its input: they are made for each use, also in the backward pass, and dropped.

Checkpoints have the original weights, which stay in host memory: `Policy.float32_weights`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.core.errors import ConfigError
from flexor.kernels.dequantize import BLOCK, dequantize
from flexor.policies.adapters import LoraLinear
from flexor.policies.base import Policy
from flexor.policies.nn.autocast import autocast_type
from flexor.policies.nn.transformer import fix_residual_dtypes
from flexor.policies.weight_names import shared_parameters, unique_parameters


class QuantizedLinear(nn.Linear):
    """Not constructed: an existing layer gets this class, then `quantize` is called. Its `weight` are the codes."""

    weight_scales: Tensor
    weight_levels: Tensor

    def quantize(self, bits: int) -> None:
        weight = self.weight.detach()
        self.bits = bits
        codes, scales = quantized(weight, bits)
        self.weight.requires_grad_(False)
        self.weight.data = codes
        self.register_buffer("weight_scales", scales, persistent=False)
        self.register_buffer("weight_levels", nf4_levels(), persistent=False)

    def load_original(self, weight: Tensor) -> None:
        """Set the weight to one that is not quantized."""
        codes, scales = quantized(weight.to(self.weight.device), self.bits)
        self.weight.data.copy_(codes)
        self.weight_scales.copy_(scales)

    def forward(self, x: Tensor) -> Tensor:
        return _QuantizedLinear.apply(
            x.to(autocast_type(x)), self.bias, self.weight, self.weight_scales, self.weight_levels, self
        )


class QuantizedLoraLinear(LoraLinear, QuantizedLinear):
    """The product of the quantized weight, and that of the adapter."""


class _QuantizedLinear(torch.autograd.Function):
    """Keeps the codes for the backward pass, not the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        codes: Tensor,
        scales: Tensor,
        levels: Tensor,
        layer: QuantizedLinear,
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, levels)
        ctx.layer = layer
        return F.linear(x, _weight(layer, codes, scales, levels, x.dtype), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        codes, scales, levels = ctx.saved_tensors
        weight = _weight(ctx.layer, codes, scales, levels, gradient.dtype)
        return gradient @ weight, None, None, None, None, None


def _weight(
    layer: QuantizedLinear, codes: Tensor, scales: Tensor, levels: Tensor, dtype: torch.dtype
) -> Tensor:
    return dequantize(codes, scales, levels, layer.out_features, layer.in_features, dtype)


def quantize_base(policy: Policy, bits: int, host: str = "cpu") -> None:
    """Quantize the frozen linear layers of the policy's blocks. The original weights stay on the device `host`."""
    fix_residual_dtypes(policy)
    names: dict[Tensor, str] = {parameter: name for name, parameter in unique_parameters(policy).items()}
    layers = [layer for block in policy.shard_units() for layer in block.modules() if _can_quantize(layer)]
    shared = shared_parameters(policy)
    for layer in layers:
        assert isinstance(layer, nn.Linear)
        if layer.weight in shared:
            continue
        name, weight = names[layer.weight], layer.weight.detach()
        on_host = weight.device.type == host
        policy.float32_weights[name] = weight if on_host else torch.empty_like(weight, device=host)
        layer.__class__ = QuantizedLoraLinear if isinstance(layer, LoraLinear) else QuantizedLinear
        assert isinstance(layer, QuantizedLinear)
        layer.quantize(bits)
    if not policy.float32_weights:
        raise ConfigError(
            f"lora.base={bits}bit: policy.type={policy.config.type} has no blocks with frozen linear layers whose "
            f"width is a multiple of {BLOCK}: leave it out."
        )


def _can_quantize(layer: nn.Module) -> bool:
    # no other subclasses: their weight may be read directly, as torch's attention does
    if type(layer) not in (nn.Linear, LoraLinear):
        return False
    assert isinstance(layer, nn.Linear)
    trained = any(p is not None and p.requires_grad for p in (layer.weight, layer.bias))
    return not trained and layer.in_features % BLOCK == 0


def nf4_levels() -> Tensor:
    """The 16 levels of NF4: 8 quantiles of the negative half of the normal distribution, 9 of the other, 0 is both."""
    last = 0.9677083  # the mean of 1 - 1/30 and 1 - 1/32: between the outermost of 15 and of 16 equal parts
    normal = torch.special.ndtri
    positive = normal(torch.linspace(last, 0.5, 9, dtype=torch.float64, device="cpu"))[:-1]
    negative = -normal(torch.linspace(last, 0.5, 8, dtype=torch.float64, device="cpu"))[:-1]
    levels = torch.cat([positive, negative, positive.new_zeros(1)]).sort().values
    return (levels / levels.max()).float()


def quantized(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """A weight's codes, two of 4 bits in a byte, and the scale of each block."""
    if weight.is_meta:
        count = weight.numel()
        codes = weight.new_empty(count // (8 // bits), dtype=torch.uint8 if bits == 4 else torch.int8)
        return codes, weight.new_empty(count // BLOCK, dtype=torch.float32)
    blocks = weight.float().reshape(-1, BLOCK)
    scales = blocks.abs().amax(1)
    values = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    if bits == 8:
        return (values * 127).round().to(torch.int8).flatten(), scales
    levels = nf4_levels()
    middles = ((levels[1:] + levels[:-1]) / 2).to(weight.device)
    low, high = torch.bucketize(values, middles, out_int32=True).to(torch.uint8).view(-1, 2).unbind(1)
    return low | high << 4, scales
