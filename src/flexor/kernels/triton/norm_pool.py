"""Triton kernels of normalisation, ReLU and max pooling, as at the start of a ResNet.

Layout and statistics are as in `norm.py`. Windows are 3x3 with stride 2.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexor.kernels.norm_shapes import channel_block, empty_map, empty_pooled, stride

PIXELS = 32  # of a row of the pooled map, per program
NO_TAP = tl.constexpr(9)  # no pixel of a window is positive


@triton.jit
def _pool(
    x, scale, shift, y, index,
    height, width, out_height, out_width, channels, stride,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    image, down = tl.program_id(0) // out_height, tl.program_id(0) % out_height
    across = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    column = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    factor = tl.load(scale + image * stride + column)[None, :]
    bias = tl.load(shift + image * stride + column)[None, :]
    x += image.to(tl.int64) * height * width * channels
    best = tl.full([PIXELS, CHANNELS], float("-inf"), tl.float32)
    best_tap = tl.zeros([PIXELS, CHANNELS], tl.int32)
    for tap in tl.static_range(9):
        row = 2 * down - 1 + tap // 3
        pixel = 2 * across - 1 + tap % 3
        mask = ((pixel >= 0) & (pixel < width) & (row >= 0) & (row < height))[:, None]
        offset = (row * width + pixel)[:, None] * channels + column[None, :]
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) * factor + bias
        value = tl.where(mask, value.to(y.dtype.element_ty).to(tl.float32), float("-inf"))
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        best_tap = tl.where(better, tap, best_tap)
    best_tap = tl.where(best <= 0, NO_TAP, best_tap)  # ReLU is zero there: nothing flows back
    best = tl.maximum(best, 0.0, propagate_nan=tl.PropagateNan.ALL)
    start = tl.program_id(0).to(tl.int64) * out_width * channels
    offset = start + across[:, None] * channels + column[None, :]
    mask = (across < out_width)[:, None]
    tl.store(y + offset, best, mask=mask)
    tl.store(index + offset, best_tap.to(tl.uint8), mask=mask)


def norm_pool(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum of relu(x * scale + shift) in 3x3 windows with stride 2, and the tap that it comes from."""
    images, channels, height, width = x.shape
    y, index = empty_pooled(x)
    block = channel_block(channels)
    _pool[(images * y.shape[2], triton.cdiv(y.shape[3], PIXELS), channels // block)](
        x, scale, shift, y, index,
        height, width, y.shape[2], y.shape[3], channels, stride(scale),
        PIXELS, block,
    )  # fmt: skip
    return y, index


@triton.jit
def _pool_sums(
    gradient, index, x, mean, plain, weighted,
    height, width, out_height, out_width, channels, stride,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A program handles a row of the pooled map. g is zero except at the maxima."""
    image, down = tl.program_id(0) // out_height, tl.program_id(0) % out_height
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    center = tl.load(mean + image * stride + column)[None, :]
    x += image.to(tl.int64) * height * width * channels
    start = tl.program_id(0).to(tl.int64) * out_width * channels
    grad_sums = tl.zeros([PIXELS, CHANNELS], tl.float32)
    weighted_sums = tl.zeros([PIXELS, CHANNELS], tl.float32)
    for first in range(0, out_width, PIXELS):
        across = first + tl.arange(0, PIXELS)
        offset = start + across[:, None] * channels + column[None, :]
        tap = tl.load(index + offset, mask=(across < out_width)[:, None], other=NO_TAP).to(tl.int32)
        mask = tap != NO_TAP
        g = tl.load(gradient + offset, mask=mask, other=0.0).to(tl.float32)
        row = 2 * down - 1 + tap // 3
        pixel = 2 * across[:, None] - 1 + tap % 3
        value = tl.load(x + (row * width + pixel) * channels + column[None, :], mask=mask, other=0.0)
        grad_sums += g
        weighted_sums += g * (value.to(tl.float32) - center)
    offset = tl.program_id(0) * channels + column
    tl.store(plain + offset, tl.sum(grad_sums, 0))
    tl.store(weighted + offset, tl.sum(weighted_sums, 0))


def norm_pool_sums(gradient: Tensor, index: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    images, channels, out_height, out_width = index.shape
    sums = x.new_empty((2, images, out_height, channels), dtype=torch.float32)
    block = channel_block(channels)
    _pool_sums[(images * out_height, channels // block)](
        gradient, index, x, mean, *sums,
        *x.shape[2:], out_height, out_width, channels, stride(mean), PIXELS, block,
    )  # fmt: skip
    return sums


@triton.jit
def _from_window(gradient, index, start, down, across, out_height, out_width, channels, column):
    """The gradients of some windows of a row, and the taps that they belong to."""
    mask = ((down < out_height) & (across < out_width))[:, None]
    offset = start + (down * out_width + across)[:, None] * channels + column[None, :]
    tap = tl.load(index + offset, mask=mask, other=NO_TAP).to(tl.int32)
    return tap, tl.load(gradient + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_row(g, x, dx, row, pixel, height, width, channels, column, a, b, d, start, USE_X: tl.constexpr):
    offset = start + (row * width + pixel)[:, None] * channels + column[None, :]
    mask = ((pixel < width) & (row < height))[:, None]
    result = a * g
    if USE_X:
        result += b * tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) + d
    tl.store(dx + offset, result, mask=mask)


@triton.jit
def _pool_backward(
    gradient, index, x, a, b, d, dx,
    height, width, out_height, out_width, channels, stride,
    USE_X: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A program handles 2x2 squares of pixels. Window (i, j) is centred at (2i, 2j), so four windows cover a square."""
    image, down = tl.program_id(0) // out_height, tl.program_id(0) % out_height
    across = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    column = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    start = image.to(tl.int64) * out_height * out_width * channels
    tap0, g0 = _from_window(gradient, index, start, down, across, out_height, out_width, channels, column)
    tap1, g1 = _from_window(gradient, index, start, down, across + 1, out_height, out_width, channels, column)
    tap2, g2 = _from_window(gradient, index, start, down + 1, across, out_height, out_width, channels, column)
    tap3, g3 = _from_window(
        gradient, index, start, down + 1, across + 1, out_height, out_width, channels, column
    )
    set_index = image * stride + column
    factor = tl.load(a + set_index)[None, :]
    slope, offset = factor, factor
    if USE_X:
        slope, offset = tl.load(b + set_index)[None, :], tl.load(d + set_index)[None, :]
    start = image.to(tl.int64) * height * width * channels
    row, pixel = 2 * down, 2 * across
    g = tl.where(tap0 == 4, g0, 0.0)
    _store_row(g, x, dx, row, pixel, height, width, channels, column, factor, slope, offset, start, USE_X)
    g = tl.where(tap0 == 5, g0, 0.0) + tl.where(tap1 == 3, g1, 0.0)
    _store_row(g, x, dx, row, pixel + 1, height, width, channels, column, factor, slope, offset, start, USE_X)
    g = tl.where(tap0 == 7, g0, 0.0) + tl.where(tap2 == 1, g2, 0.0)
    _store_row(g, x, dx, row + 1, pixel, height, width, channels, column, factor, slope, offset, start, USE_X)
    g = tl.where(tap0 == 8, g0, 0.0) + tl.where(tap1 == 6, g1, 0.0)
    g += tl.where(tap2 == 2, g2, 0.0) + tl.where(tap3 == 0, g3, 0.0)
    _store_row(
        g, x, dx, row + 1, pixel + 1, height, width, channels, column, factor, slope, offset, start, USE_X
    )


def norm_pool_backward(
    gradient: Tensor,
    index: Tensor,
    x: Tensor | None,
    a: Tensor,
    b: Tensor | None,
    d: Tensor | None,
    height: int,
    width: int,
) -> Tensor:
    images, channels, out_height, out_width = gradient.shape
    dx = empty_map(gradient, height, width)
    block = channel_block(channels)
    _pool_backward[(images * out_height, triton.cdiv(out_width, PIXELS), channels // block)](
        gradient, index, x, a, b, d, dx,
        height, width, out_height, out_width, channels, stride(a),
        x is not None, PIXELS, block,
    )  # fmt: skip
    return dx
