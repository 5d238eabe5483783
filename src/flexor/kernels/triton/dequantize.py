"""Triton kernel of the operator in `kernels/dequantize.py`."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexor.kernels.dequantize import BLOCK as block_of_a_scale
from flexor.kernels.dequantize import LARGEST_CODE as largest_code

PER_PROGRAM = 2048
SCALE_BLOCK, LARGEST_CODE = tl.constexpr(block_of_a_scale), tl.constexpr(float(largest_code))


@triton.jit
def _dequantize(codes, scales, levels, out, count, FOUR_BITS: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    if FOUR_BITS:
        byte = tl.load(codes + index // 2, mask=mask, other=0).to(tl.int32)
        code = (byte >> ((index % 2) * 4).to(tl.int32)) & 15
        value = tl.load(levels + code, mask=mask, other=0.0)
    else:
        value = tl.load(codes + index, mask=mask, other=0).to(tl.float32) / LARGEST_CODE
    value *= tl.load(scales + index // SCALE_BLOCK, mask=mask, other=0.0)
    tl.store(out + index, value.to(out.dtype.element_ty), mask=mask)


def dequantize(
    codes: Tensor, scales: Tensor, levels: Tensor, rows: int, columns: int, dtype: torch.dtype
) -> Tensor:
    out = codes.new_empty((rows, columns), dtype=dtype)
    programs = (triton.cdiv(out.numel(), PER_PROGRAM),)
    _dequantize[programs](codes, scales, levels, out, out.numel(), codes.dtype == torch.uint8, PER_PROGRAM)
    return out
