"""The Triton kernel of the operator in `kernels/level_table.py`."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PIXELS = 4096  # per program


@triton.jit
def _look_up(images, table, out, pixels, channels, levels, PIXELS: tl.constexpr):
    """A program handles a block of pixels of one channel of one image."""
    start = tl.program_id(0).to(tl.int64) * pixels
    table += (tl.program_id(0) % channels) * levels
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    inside = pixel < pixels
    level = tl.load(images + start + pixel, mask=inside, other=0).to(tl.int32)
    tl.store(out + start + pixel, tl.load(table + level), mask=inside)


def look_up_levels(images: Tensor, table: Tensor) -> Tensor:
    """Images of bytes [..., C, H, W], contiguous, and a table [C, levels]."""
    channels, height, width = images.shape[-3:]
    pixels = height * width
    out = torch.empty_like(images, dtype=table.dtype)
    grid = images[..., 0, 0].numel(), triton.cdiv(pixels, PIXELS)
    _look_up[grid](images, table, out, pixels, channels, table.shape[1], PIXELS, num_warps=8)
    return out
