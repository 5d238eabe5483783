"""The Triton kernels of the operators in `kernels/quick_gelu.py`."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexor.kernels.quick_gelu import SLOPE as quick_gelu_slope

BLOCK = 4096  # values of a program
SLOPE = tl.constexpr(quick_gelu_slope)


@triton.jit
def _forward(x, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(y + at, (value * tl.sigmoid(SLOPE * value)).to(y.dtype.element_ty), mask=at < count)


@triton.jit
def _backward(gradient, x, dx, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    given = tl.load(gradient + at, mask=at < count, other=0.0).to(tl.float32)
    share = tl.sigmoid(SLOPE * value)
    slope = share * (1 + SLOPE * value * (1 - share))
    tl.store(dx + at, (given * slope).to(dx.dtype.element_ty), mask=at < count)


def quick_gelu(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _forward[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK)
    return y


def quick_gelu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    dx = torch.empty_like(x)
    _backward[(triton.cdiv(x.numel(), BLOCK),)](gradient, x, dx, x.numel(), BLOCK)
    return dx
