"""How the normalisation kernels tile their inputs, and the shapes of their outputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PROGRAMS = 1024  # per kernel, if the map is large enough
ROWS = 64  # pixels of a tile


class PixelSplit(NamedTuple):
    """How the pixels of an image are divided among programs."""

    parts: int
    rows: int
    """Pixels per part; the last one may have fewer."""
    channels: int
    """Channels per program."""


def split(images: int, channels: int, pixels: int) -> PixelSplit:
    width = channel_block(channels)
    parts = max(1, PROGRAMS // (images * (channels // width)))
    rows = ROWS * -(-pixels // (parts * ROWS))
    return PixelSplit(-(-pixels // rows), rows, width)


def channel_block(channels: int) -> int:
    return next(size for size in (64, 32, 16) if channels % size == 0)


def shape_of(x: Tensor) -> tuple[int, int, int]:
    """Images, channels and pixels of a map [N, C, H, W]."""
    images, channels, height, width = x.shape
    return images, channels, height * width


def empty_sums(x: Tensor) -> Tensor:
    images, channels, pixels = shape_of(x)
    return x.new_empty((2, images, split(images, channels, pixels).parts, channels), dtype=torch.float32)


def empty_map(like: Tensor, height: int, width: int) -> Tensor:
    size = (*like.shape[:2], height, width)
    return torch.empty(size, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def empty_pooled(x: Tensor) -> tuple[Tensor, Tensor]:
    """For the maxima of 3x3 windows with stride 2, and the taps that they come from."""
    y = empty_map(x, *((size - 1) // 2 + 1 for size in x.shape[2:]))
    return y, torch.empty_like(y, dtype=torch.uint8)


def empty_statistics(x: Tensor, groups: int) -> Tensor:
    return x.new_empty((4, x.shape[0] if groups else 1, x.shape[1]), dtype=torch.float32)


def empty_factors(sums: Tensor, groups: int) -> Tensor:
    return sums.new_empty((5, sums.shape[1] if groups else 1, sums.shape[3]))


# Sequences [B, C, T].


def empty_group_statistics(x: Tensor, groups: int) -> Tensor:
    return x.new_empty((2, x.shape[0], groups), dtype=torch.float32)


def empty_parts(x: Tensor) -> Tensor:
    return x.new_empty((2, *x.shape[:2]), dtype=torch.float32)


def empty_film_gradient(x: Tensor, film: Tensor | None) -> Tensor:
    """Without columns if there is no film."""
    return x.new_empty((x.shape[0], 0)) if film is None else film.new_empty(film.shape)


def stride(per_image: Tensor) -> int:
    """The stride from one image's statistics to the next; 0 if they are shared."""
    return 0 if per_image.shape[0] == 1 else per_image.shape[1]
