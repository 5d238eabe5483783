"""Triton kernels of the operators in `kernels/quick_gelu.py`."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexor.kernels.quick_gelu import SLOPE as quick_gelu_slope

BLOCK = 4096  # values per program
SLOPE = tl.constexpr(quick_gelu_slope)


@triton.jit
def _forward(x, y, count, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + index, mask=index < count, other=0.0).to(tl.float32)
    tl.store(y + index, (value * tl.sigmoid(SLOPE * value)).to(y.dtype.element_ty), mask=index < count)


@triton.jit
def _backward(gradient, x, dx, count, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + index, mask=index < count, other=0.0).to(tl.float32)
    grad = tl.load(gradient + index, mask=index < count, other=0.0).to(tl.float32)
    gate = tl.sigmoid(SLOPE * value)
    slope = gate * (1 + SLOPE * value * (1 - gate))
    tl.store(dx + index, (grad * slope).to(dx.dtype.element_ty), mask=index < count)


def quick_gelu(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _forward[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK)
    return y


def quick_gelu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    dx = torch.empty_like(x)
    _backward[(triton.cdiv(x.numel(), BLOCK),)](gradient, x, dx, x.numel(), BLOCK)
    return dx
