"""The operators of `fused_norm.py`: what they take and return. Their kernels are in `fused_norm_kernels.py`.

A plan runs them on the meta device, on machines that have neither a GPU nor Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

PROGRAMS = 1024  # that a kernel is split into, if the map is large enough
ROWS = 64  # of a tile


class Split(NamedTuple):
    """How the pixels of an image are divided among programs."""

    parts: int
    rows: int
    """Pixels per part; the last one may have fewer."""
    channels: int
    """Channels per program."""


def split(images: int, channels: int, pixels: int) -> Split:
    width = channel_block(channels)
    parts = max(1, PROGRAMS // (images * (channels // width)))
    rows = ROWS * -(-pixels // (parts * ROWS))
    return Split(-(-pixels // rows), rows, width)


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
    """For the largest values of windows of 3 by 3 pixels at every second pixel, and for their places."""
    y = empty_map(x, *((size - 1) // 2 + 1 for size in x.shape[2:]))
    return y, torch.empty_like(y, dtype=torch.uint8)


def empty_statistics(x: Tensor, groups: int) -> Tensor:
    return x.new_empty((4, x.shape[0] if groups else 1, x.shape[1]), dtype=torch.float32)


def empty_factors(sums: Tensor, groups: int) -> Tensor:
    return sums.new_empty((5, sums.shape[1] if groups else 1, sums.shape[3]))


def _operator(name: str, schema: str, empty: Callable[..., Any]) -> None:
    """`empty` makes the results without computing them."""

    def run(*arguments: Any) -> Any:
        from flexor.policies.nn import fused_norm_kernels

        return getattr(fused_norm_kernels, name)(*arguments)

    torch.library.define(f"flexor::{name}", schema)
    torch.library.impl(
        f"flexor::{name}", ("cuda", "cpu"), run
    )  # the CPU's is Triton's interpreter, for tests
    torch.library.register_fake(f"flexor::{name}", empty)


_operator(
    "norm_statistics",
    "(Tensor x, Tensor weight, Tensor bias, int groups, float eps, Tensor(a!)? running_mean, "
    "Tensor(b!)? running_var, float momentum) -> Tensor",
    lambda x, weight, bias, groups, *_: empty_statistics(x, groups),
)
_operator(
    "norm_apply",
    "(Tensor x, Tensor scale, Tensor shift, Tensor? residual, bool relu) -> Tensor",
    lambda x, *_: torch.empty_like(x),
)
_operator(
    "norm_pool",
    "(Tensor x, Tensor scale, Tensor shift) -> (Tensor, Tensor)",
    lambda x, *_: empty_pooled(x),
)
_operator(
    "norm_sums",
    "(Tensor gradient, Tensor x, Tensor mean, Tensor? scale, Tensor? shift) -> Tensor",
    lambda gradient, x, *_: empty_sums(x),
)
_operator(
    "norm_sums_residual",
    "(Tensor gradient, Tensor x, Tensor y, Tensor mean) -> (Tensor, Tensor)",
    lambda gradient, x, *_: (torch.empty_like(gradient), empty_sums(x)),
)
_operator(
    "norm_pool_sums",
    "(Tensor gradient, Tensor index, Tensor x, Tensor mean) -> Tensor",
    lambda gradient, *_: gradient.new_empty(
        (2, gradient.shape[0], gradient.shape[2], gradient.shape[1]), dtype=torch.float32
    ),
)
_operator(
    "norm_factors",
    "(Tensor sums, Tensor weight, Tensor mean, Tensor rstd, int groups, int pixels) -> Tensor",
    lambda sums, weight, mean, rstd, groups, pixels: empty_factors(sums, groups),
)
_operator(
    "norm_backward",
    "(Tensor gradient, Tensor? y, Tensor? x, Tensor a, Tensor? b, Tensor? d, Tensor? scale, Tensor? shift) "
    "-> Tensor",
    lambda gradient, *_: torch.empty_like(gradient),
)
_operator(
    "norm_backward_residual",
    "(Tensor gradient, Tensor y, Tensor a) -> (Tensor, Tensor)",
    lambda gradient, *_: (torch.empty_like(gradient), torch.empty_like(gradient)),
)
_operator(
    "norm_pool_backward",
    "(Tensor gradient, Tensor index, Tensor? x, Tensor a, Tensor? b, Tensor? d, int height, int width) "
    "-> Tensor",
    lambda gradient, index, x, a, b, d, height, width: empty_map(gradient, height, width),
)
