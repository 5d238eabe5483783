"""Resizing images of bytes as OpenCV's INTER_AREA does, on any device.

An image that shrinks is averaged over areas. One that grows is interpolated, with weights of 11 bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

COEFFICIENT = 1 << 11  # a weight of 1
TINY_SHARE = 1e-3  # of a pixel: OpenCV leaves it out


class ResizeArea(nn.Module):
    """Images [B, 3, H, W] in [0, 1] -> [B, 3, height, width] whose values are whole 255ths."""

    down: Tensor
    across: Tensor

    def __init__(self, size: tuple[int, int], resized: tuple[int, int]):
        """Height and width of the images, before and after."""
        super().__init__()
        self.same = size == resized
        self.averages = size[0] >= resized[0] and size[1] >= resized[1]
        self.halves = (size[0], size[1]) == (2 * resized[0], 2 * resized[1])
        table = area_weights if self.averages else linear_weights
        for name, old, new in zip(("down", "across"), size, resized):
            self.register_buffer(name, table(old, new), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        levels = (images.float() * 255).round().clamp(0, 255)
        if not self.same:
            levels = self._average(levels) if self.averages else self._interpolate(levels)
        return levels / 255

    def _average(self, levels: Tensor) -> Tensor:
        with torch.autocast(levels.device.type, enabled=False):
            mean = self.down.double() @ (levels.double() @ self.across.double().mT)
        return (torch.floor(mean + 0.5) if self.halves else mean.round()).clamp(0, 255).float()

    def _interpolate(self, levels: Tensor) -> Tensor:
        """In whole numbers, of which float64 holds all that occur."""
        with torch.autocast(levels.device.type, enabled=False):
            rows = (levels.double() @ self.across.double().mT / 16).floor()
        first, second = self._neighbours
        terms = [
            (weight * rows.index_select(-2, source) / 65536).floor() for source, weight in (first, second)
        ]
        return ((terms[0] + terms[1] + 2) / 4).floor().clamp(0, 255).float()

    @property
    def _neighbours(self) -> list[tuple[Tensor, Tensor]]:
        """Of each row, the two that it is interpolated of, and their weights [rows, 1]."""
        weights, sources = self.down.topk(2, dim=1)
        return [(sources[:, n], weights[:, n : n + 1].double()) for n in (0, 1)]


def area_weights(old: int, new: int) -> Tensor:
    """[new, old]: the share of each of `old` pixels in each of `new` ones."""
    table = torch.zeros(new, old, device="cpu")
    scale = old / new
    for pixel in range(new):
        start, end = pixel * scale, (pixel + 1) * scale
        width = min(scale, old - start)
        last = min(math.floor(end), old - 1)
        first = min(math.ceil(start), last)
        if first - start > TINY_SHARE:
            table[pixel, first - 1] += (first - start) / width
        table[pixel, first:last] += 1 / width
        if end - last > TINY_SHARE:
            table[pixel, last] += min(end - last, 1.0, width) / width
    return table


def linear_weights(old: int, new: int) -> Tensor:
    """[new, old]: whole numbers, of which those of a pixel add up to about COEFFICIENT."""
    table = torch.zeros(new, old, device="cpu")
    scale = old / new
    for pixel in range(new):
        source = math.floor(pixel * scale)
        share = max(0.0, (pixel + 1) - (source + 1) / scale)
        share -= math.floor(share)
        if source >= old - 1:
            source, share = old - 1, 0.0
        table[pixel, source] += round((1 - share) * COEFFICIENT)
        if share:
            table[pixel, source + 1] += round(share * COEFFICIENT)
    return table
