"""The Triton kernel of the operator `cast_into` in `kernels/cast.py`."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

VALUES = 2048  # of a program


@triton.jit
def _cast(target, source, count, VALUES: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    mask = index < count
    tl.store(target + index, tl.load(source + index, mask=mask).to(target.dtype.element_ty), mask=mask)


def cast_into(target: Tensor, source: Tensor) -> None:
    """Both have the same memory layout, without gaps."""
    count = source.numel()
    _cast[(triton.cdiv(count, VALUES),)](target, source, count, VALUES)
