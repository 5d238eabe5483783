"""QuickGELU, CLIP's activation function: x * sigmoid(1.702 * x), in one kernel.

torch has eight kernels for it, forward and backward. The Triton kernels of `triton/quick_gelu.py` read and write each
value once, compute in float32, and round the result. Everywhere else torch computes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flexor.kernels.available import DTYPES, has_kernels
from flexor.kernels.operator import define_operator

SLOPE = 1.702

define_operator("quick_gelu", "(Tensor x) -> Tensor", torch.empty_like, "quick_gelu")
define_operator(
    "quick_gelu_backward",
    "(Tensor gradient, Tensor x) -> Tensor",
    lambda gradient, x: torch.empty_like(x),
    "quick_gelu",
)


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _QuickGELU.apply(x) if _fused(x) else plain(x)


def plain(x: Tensor) -> Tensor:
    return x * torch.sigmoid(SLOPE * x)


def _fused(x: Tensor) -> bool:
    """Whether the kernels can be used. torch.compile fuses the operations itself."""
    if x.dtype not in DTYPES or torch.compiler.is_compiling():
        return False
    return x.is_contiguous() and has_kernels(x.device)


class _QuickGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.ops.flexor.quick_gelu(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.ops.flexor.quick_gelu_backward(gradient.contiguous(), *ctx.saved_tensors)
