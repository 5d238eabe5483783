"""Weights of 8 or 4 bits, back in a floating-point type: in one kernel on NVIDIA GPUs, elsewhere by torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flexor.kernels.available import has_kernels
from flexor.kernels.operator import define_operator

BLOCK = 64  # neighbouring weights that have one scale
LARGEST_CODE = 127  # of 8 bits

define_operator(
    "dequantize",
    "(Tensor codes, Tensor scales, Tensor levels, int rows, int columns, ScalarType dtype) -> Tensor",
    lambda codes, scales, levels, rows, columns, dtype: codes.new_empty((rows, columns), dtype=dtype),
    "dequantize",
)


def dequantize(
    codes: Tensor, scales: Tensor, levels: Tensor, rows: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """[rows, columns] of a matrix's codes: int8, or uint8 with two codes of 4 bits, whose values are `levels`."""
    if not torch.compiler.is_compiling() and has_kernels(codes.device):
        return torch.ops.flexor.dequantize(codes, scales, levels, rows, columns, dtype)
    if codes.dtype == torch.int8:
        values = codes.float() / LARGEST_CODE
    else:  # a table of both codes of a byte
        pairs = torch.stack((levels.repeat(16), levels.repeat_interleave(16)), dim=1)
        values = F.embedding(codes.int(), pairs)
    return (values.view(-1, BLOCK) * scales[:, None]).to(dtype).view(rows, columns)
