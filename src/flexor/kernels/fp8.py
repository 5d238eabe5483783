"""Matrices in fp8 and their products, on GPUs that multiply in fp8; elsewhere torch computes the same.

A matrix has one scale, a power of two that brings its largest magnitude just below the largest number of the type. So
scaling is exact, and one cast makes a matrix and its transpose: a GPU multiplies rows with rows only, so what is an
operand of two products is needed both ways. Two kernels read the matrix: for its largest magnitude, and to cast it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flexor.kernels.available import DTYPES, has_kernels
from flexor.kernels.operator import define_operator

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of rows and columns in a product
MOST_MAXIMA = 512  # parts of a matrix, each with its largest magnitude
PART = 4096  # values of a part, at least
# Of the largest number: its exponent, and its mantissa as `frexp` returns it.
LARGEST = {E4M3: (9, 0.875), E5M2: (16, 0.875)}
MOST_EXPONENT = 126  # of a scale: it and its inverse are float32 numbers


def padded(rows: int) -> int:
    """Rows of a matrix whose transpose is an operand."""
    return -(-rows // MULTIPLE) * MULTIPLE


def parts_of(x: Tensor) -> int:
    return min(MOST_MAXIMA, -(-x.numel() // PART))


define_operator(
    "fp8_maxima",
    "(Tensor x) -> Tensor",
    lambda x: x.new_empty(parts_of(x), dtype=torch.float32),
    "fp8",
)
define_operator(
    "fp8_cast",
    "(Tensor x, Tensor maxima, ScalarType dtype, bool straight, bool transposed) -> (Tensor, Tensor, Tensor)",
    lambda x, maxima, dtype, straight, transposed: (
        x.new_empty(x.shape if straight else (0, 0), dtype=dtype),
        x.new_empty((x.shape[1], padded(x.shape[0])) if transposed else (0, 0), dtype=dtype),
        x.new_empty((), dtype=torch.float32),
    ),
    "fp8",
)


class Fp8Matrix(NamedTuple):
    """A matrix, its transpose, or both; what was not asked for is empty."""

    straight: Tensor
    """[rows, columns]"""
    transposed: Tensor
    """[columns, rows], with zeros up to a multiple of 16 rows"""
    inverse_scale: Tensor


def largest_magnitudes(x: Tensor) -> Tensor:
    """Of parts of a matrix, in float32. NaN may be left out: `cast` keeps it."""
    if _fused(x):
        return torch.ops.flexor.fp8_maxima(x)
    return x.detach().abs().amax().float().view(1)


def cast(
    x: Tensor, maxima: Tensor, dtype: torch.dtype, *, straight: bool = True, transposed: bool = True
) -> Fp8Matrix:
    """x [rows, columns] in fp8, scaled by the largest of `maxima`. With an infinite value, all are NaN."""
    if _fused(x):
        return Fp8Matrix(*torch.ops.flexor.fp8_cast(x, maxima, dtype, straight, transposed))
    scale, inverse = scale_of(maxima.amax(), dtype)
    values = (x.detach().float() * scale).to(dtype)
    empty = values.new_empty((0, 0))
    columns = F.pad(values.T.float(), (0, padded(len(x)) - len(x))).to(dtype) if transposed else empty
    return Fp8Matrix(values if straight else empty, columns, inverse)


def scale_of(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The scale of a matrix with this largest magnitude, and its inverse: powers of two."""
    most, limit = LARGEST[dtype]
    mantissa, exponent = torch.frexp(largest)
    power = (most - exponent.float() - (mantissa > limit).float()).clamp(-MOST_EXPONENT, MOST_EXPONENT)
    power = torch.where(largest > 0, power, 0.0)
    power = torch.where(largest.isfinite(), power, torch.nan)
    return power.exp2(), (-power).exp2()


def product(
    left: Tensor,
    right: Tensor,
    inverse_scales: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    exact_sums: bool,
) -> Tensor:
    """left [M, K] times the transpose of right [N, K], plus `bias` in `dtype`: [M, N] in `dtype`.

    Hopper's tensor cores add up in fewer than 32 bits. With `exact_sums`, their sums of 128 products are added up in
    float32.
    """
    if left.device.type in ("cuda", "meta"):
        scales = {"scale_a": inverse_scales[0], "scale_b": inverse_scales[1]}
        return torch._scaled_mm(
            left, right.t(), **scales, bias=bias, out_dtype=dtype, use_fast_accum=not exact_sums
        )
    out = left.float() @ right.float().T * (inverse_scales[0] * inverse_scales[1])
    return (out if bias is None else out + bias.float()).to(dtype)


def _fused(x: Tensor) -> bool:
    return x.dtype in DTYPES and x.is_contiguous() and has_kernels(x.device)
