"""The Triton kernel of the operator `add_gpu_time` in `kernels/gpu_clock.py`."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer


@triton.jit
def _add_gpu_time(clock, BEGIN: tl.constexpr):
    now = globaltimer().to(tl.int64)
    if BEGIN:
        tl.store(clock + 1, now)
    else:
        tl.store(clock, tl.load(clock) + now - tl.load(clock + 1))


def add_gpu_time(clock: Tensor, begin: bool) -> None:
    """`clock`: int64 [2], nanoseconds in all, and when the last began."""
    _add_gpu_time[(1,)](clock, begin, num_warps=1)
