"""Triton kernels of the operators in `kernels/fp8.py`. Both are bound by memory bandwidth.

The largest magnitude of a matrix is found in parts, without atomic operations: nothing has to be set to zero before,
and all programs of the cast take the maximum of the same parts.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexor.kernels.fp8 import LARGEST, MOST_EXPONENT, MOST_MAXIMA, padded, parts_of

VALUES = 2048  # that a program reads at once
TILE_ROWS, TILE_COLUMNS = (
    128,
    64,
)  # 128 bytes of each row and column of the result, 128 of each row of x in bfloat16
WARPS = 8
MOST_POWER = tl.constexpr(MOST_EXPONENT)


@triton.jit
def _maxima(x, maxima, count, VALUES: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([VALUES], dtype=tl.float32)
    for start in range(program * VALUES, count, tl.num_programs(0) * VALUES):
        index = start + tl.arange(0, VALUES)
        values = tl.load(x + index, mask=index < count, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))
    tl.store(maxima + program, tl.max(largest, axis=0))


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _cast(
    x, maxima, straight, transposed, inverse_scale,
    rows, columns, padded_rows, parts, most,
    STRAIGHT: tl.constexpr, TRANSPOSED: tl.constexpr,
    MAXIMA: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    part = tl.arange(0, MAXIMA)
    largest = tl.max(tl.load(maxima + part, mask=part < parts, other=0.0), axis=0)
    # of a float32: exponent and mantissa. Of the largest number of either type, the mantissa is 1.75.
    bits = largest.to(tl.int32, bitcast=True)
    power = most - 1 - ((bits >> 23) - 127) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    power = tl.minimum(tl.maximum(power, -MOST_POWER), MOST_POWER)
    power = tl.where(largest > 0, power, 0)
    finite = largest < float("inf")
    scale = tl.where(finite, _power_of_two(power), float("nan"))

    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < columns)
    values = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32) * scale
    if STRAIGHT:
        tl.store(straight + row * columns + column, values.to(straight.dtype.element_ty), mask=inside)
    if TRANSPOSED:
        # rows beyond those of x are zero
        values = tl.where(inside, values, 0.0).to(transposed.dtype.element_ty)
        place = tl.trans(column * padded_rows + row)
        within = tl.trans((row < padded_rows) & (column < columns))
        tl.store(transposed + place, tl.trans(values), mask=within)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inverse_scale, tl.where(finite, _power_of_two(-power), float("nan")))


def fp8_maxima(x: Tensor) -> Tensor:
    maxima = x.new_empty(parts_of(x), dtype=torch.float32)
    _maxima[(len(maxima),)](x, maxima, x.numel(), VALUES)
    return maxima


def fp8_cast(
    x: Tensor, maxima: Tensor, dtype: torch.dtype, straight: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    (rows, columns), wide = x.shape, padded(x.shape[0])
    out = x.new_empty(x.shape if straight else (0, 0), dtype=dtype)
    out_transposed = x.new_empty((columns, wide) if transposed else (0, 0), dtype=dtype)
    inverse_scale = x.new_empty((), dtype=torch.float32)
    programs = (triton.cdiv(wide, TILE_ROWS), triton.cdiv(columns, TILE_COLUMNS))
    _cast[programs](
        *(x, maxima, out, out_transposed, inverse_scale),
        *(rows, columns, wide, len(maxima), LARGEST[dtype][0]),
        *(straight, transposed, MOST_MAXIMA, TILE_ROWS, TILE_COLUMNS),
        num_warps=WARPS,
    )
    return out, out_transposed, inverse_scale
