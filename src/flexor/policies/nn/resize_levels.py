"""Resizing images of bytes as Pillow does, to the last bit, on any device.

Pillow's weights are integers, multiples of 2^-22, and each of its two passes rounds to a byte. Sums of integers are the
same in any order, so a GPU gets what Pillow gets: what `transformers` prepares for a model, without the host.

Columns come first, as in all Pillows before 13, which LeRobot requires. Later ones begin with the rows where that is
less work: where the height shrinks more than the width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

BITS = 22  # of the weights' fractions
TORCH_BITS = 15  # of torch's weights, with their sign
SHARPNESS = -0.5  # of the bicubic filter
SUPPORT = 2.0  # pixels to either side that it reaches


class ResizeLevels(nn.Module):
    """Images [B, 3, H, W] in [0, 1] -> [B, 3, height, width] whose values are whole 255ths. Bicubic, antialiased."""

    def __init__(self, size: tuple[int, int], resized: tuple[int, int], like_torch: bool = False):
        """Height and width of the images, before and after. `like_torch`: as torch resizes images of bytes on a CPU,
        whose weights are rounded to 16 bits."""
        super().__init__()
        self.size = size
        axes = zip((-1, -2), reversed(size), reversed(resized))
        self.passes = nn.ModuleList(
            ResizeAxis(axis, old, new, like_torch) for axis, old, new in axes if old != new
        )

    def forward(self, images: Tensor) -> Tensor:
        levels = (images.float() * 255).round().clamp(0, 255)
        if self.passes:
            integers = levels.to(torch.int32)
            for resize in self.passes:
                integers = resize(integers)
            levels = integers.float()
        return levels / 255


class ResizeAxis(nn.Module):
    """One axis of images of integers from 0 to 255."""

    sources: Tensor
    weights: Tensor

    def __init__(self, axis: int, old: int, new: int, like_torch: bool = False):
        """`axis` counts from the end: -1 or -2."""
        super().__init__()
        self.across = axis == -1
        sources, weights, self.bits = filter_table(old, new, like_torch)
        self.register_buffer("sources", sources, persistent=False)
        self.register_buffer("weights", weights[..., None], persistent=False)

    def forward(self, levels: Tensor) -> Tensor:
        rows = levels.mT.contiguous() if self.across else levels  # rows are copied faster than columns
        shape = (*rows.shape[:-2], self.weights.shape[1], rows.shape[-1])
        total = rows.new_full(shape, 1 << (self.bits - 1))  # rounds
        for source, weight in zip(self.sources, self.weights, strict=True):
            total.addcmul_(rows.index_select(-2, source), weight)
        resized = (total >> self.bits).clamp_(0, 255)
        return resized.mT.contiguous() if self.across else resized


def filter_table(old: int, new: int, like_torch: bool = False) -> tuple[Tensor, Tensor, int]:
    """For each of `new` pixels, which of `old` ones it is computed of, and their weights: int32 [taps, new] each.

    The last is the number of bits of the weights' fractions.
    """
    scale = old / new
    spread = max(scale, 1.0)  # a smaller image is smoothed
    rows = []
    for pixel in range(new):
        center = (pixel + 0.5) * scale
        first = max(0, int(center - SUPPORT * spread + 0.5))
        last = min(old, int(center + SUPPORT * spread + 0.5))
        weights = [_bicubic((source - center + 0.5) / spread) for source in range(first, last)]
        total = sum(weights)
        rows.append([(first + n, weight / total) for n, weight in enumerate(weights)])
    largest = max(weight for row in rows for _, weight in row)
    bits = most_bits(largest) if like_torch else BITS
    taps = max(map(len, rows))
    fixed = [[(source, _fixed(weight, bits)) for source, weight in row] for row in rows]
    padded = [row + [(0, 0)] * (taps - len(row)) for row in fixed]
    sources, weights = torch.tensor(padded, dtype=torch.int32, device="cpu").permute(2, 1, 0)
    return sources.contiguous(), weights.contiguous(), bits


def most_bits(largest: float) -> int:
    """How many bits fractions may have, so that the largest weight fits into 16 bits."""
    return next(
        bits for bits in range(BITS + 1) if bits == BITS or _fixed(largest, bits + 1) >= 1 << TORCH_BITS
    )


def _bicubic(distance: float) -> float:
    x = abs(distance)
    if x < 1:
        return ((SHARPNESS + 2) * x - (SHARPNESS + 3)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * SHARPNESS if x < SUPPORT else 0.0


def _fixed(weight: float, bits: int) -> int:
    return int(math.copysign(0.5, weight) + weight * (1 << bits))
