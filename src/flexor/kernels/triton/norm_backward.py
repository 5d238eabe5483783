"""Triton kernels of the operators in `kernels/norm.py` for the backward pass; layout as in `norm.py`.

Of y = relu(x * scale + shift + residual), with g = dy where y > 0:
  dx = a * g + b * x + d      [S, C] each; b and d are 0 with fixed statistics
  dresidual = g
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexor.kernels.norm_shapes import ROWS, empty_factors, empty_sums, shape_of, split, stride


@triton.jit
def _backward(
    gradient, y, x, a, b, d, scale, shift, dx, masked,
    pixels, channels, parts, rows, stride,
    MASK_Y: tl.constexpr, MASK_X: tl.constexpr, USE_X: tl.constexpr, STORE_MASKED: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    image, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    start = image.to(tl.int64) * pixels * channels
    set_index = image * stride + column
    factor = tl.load(a + set_index)[None, :]
    if USE_X:
        slope, constant = tl.load(b + set_index)[None, :], tl.load(d + set_index)[None, :]
    if MASK_X:
        relu_scale, relu_shift = tl.load(scale + set_index)[None, :], tl.load(shift + set_index)[None, :]
    end = tl.minimum((part + 1) * rows, pixels)
    for first in range(part * rows, end, ROWS):
        row = first + tl.arange(0, ROWS)
        offset = start + row[:, None] * channels + column[None, :]
        mask = (row < end)[:, None]
        g = tl.load(gradient + offset, mask=mask, other=0.0).to(tl.float32)
        if MASK_Y:
            g = tl.where(tl.load(y + offset, mask=mask, other=0.0) > 0, g, 0.0)
        if USE_X:
            value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
            if MASK_X:
                g = tl.where(value * relu_scale + relu_shift > 0, g, 0.0)
            result = factor * g + slope * value + constant
        else:
            result = factor * g
        tl.store(dx + offset, result, mask=mask)
        if STORE_MASKED:
            tl.store(masked + offset, g, mask=mask)


def norm_backward(
    gradient: Tensor,
    y: Tensor | None,
    x: Tensor | None,
    a: Tensor,
    b: Tensor | None,
    d: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    masked: Tensor | None = None,
) -> Tensor:
    """dx. `y`, or `x` with `scale`, says where ReLU was zero; without them there is none. `masked` gets g."""
    images, channels, pixels = shape_of(gradient)
    parts, rows, width = split(images, channels, pixels)
    dx = torch.empty_like(gradient)
    _backward[(images * parts, channels // width)](
        gradient, y, x, a, b, d, scale, shift, dx, masked,
        pixels, channels, parts, rows, stride(a),
        y is not None, scale is not None, x is not None, masked is not None, ROWS, width,
    )  # fmt: skip
    return dx


def norm_backward_residual(gradient: Tensor, y: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """dx and dresidual, with fixed statistics."""
    masked = torch.empty_like(gradient)
    return norm_backward(gradient, y, None, a, None, None, None, None, masked), masked


@triton.jit
def _sums(
    gradient, x, y, mean, scale, shift, masked, plain, weighted,
    pixels, channels, parts, rows, stride,
    MASK_Y: tl.constexpr, MASK_X: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The sums of g and of g * (x - mean) of each part. With MASK_Y, g is stored too."""
    image, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    start = image.to(tl.int64) * pixels * channels
    set_index = image * stride + column
    center = tl.load(mean + set_index)[None, :]
    if MASK_X:
        relu_scale, relu_shift = tl.load(scale + set_index)[None, :], tl.load(shift + set_index)[None, :]
    grad_sums = tl.zeros([ROWS, CHANNELS], tl.float32)
    weighted_sums = tl.zeros([ROWS, CHANNELS], tl.float32)
    end = tl.minimum((part + 1) * rows, pixels)
    for first in range(part * rows, end, ROWS):
        row = first + tl.arange(0, ROWS)
        offset = start + row[:, None] * channels + column[None, :]
        mask = (row < end)[:, None]
        g = tl.load(gradient + offset, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        if MASK_Y:
            g = tl.where(tl.load(y + offset, mask=mask, other=0.0) > 0, g, 0.0)
            tl.store(masked + offset, g, mask=mask)
        if MASK_X:
            g = tl.where(value * relu_scale + relu_shift > 0, g, 0.0)
        grad_sums += g
        weighted_sums += g * (value - center)
    offset = tl.program_id(0) * channels + column
    tl.store(plain + offset, tl.sum(grad_sums, 0))
    tl.store(weighted + offset, tl.sum(weighted_sums, 0))


def norm_sums(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    y: Tensor | None = None,
    masked: Tensor | None = None,
) -> Tensor:
    """The sums of g and of g * (x - mean): [2, N, P, C]. `y`, or `scale`, says where ReLU was zero."""
    images, channels, pixels = shape_of(x)
    parts, rows, width = split(images, channels, pixels)
    sums = empty_sums(x)
    _sums[(images * parts, channels // width)](
        gradient, x, y, mean, scale, shift, masked, *sums,
        pixels, channels, parts, rows, stride(mean), y is not None, scale is not None, ROWS, width,
    )  # fmt: skip
    return sums


def norm_sums_residual(gradient: Tensor, x: Tensor, y: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """g, and the sums."""
    masked = torch.empty_like(gradient)
    return masked, norm_sums(gradient, x, mean, None, None, y, masked)


@triton.jit
def _finish_sums(
    plain, weighted, weight, mean, rstd,
    factors,  # a, b, d, and the gradients of weight and bias: [5, S, C]
    entries, channels, count,
    GROUPED: tl.constexpr, ENTRIES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    plain += tl.program_id(0) * entries * channels
    weighted += tl.program_id(0) * entries * channels
    grad_sum = tl.zeros([CHANNELS], tl.float32)
    weighted_sum = tl.zeros([CHANNELS], tl.float32)
    for first in range(0, entries, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        mask = (entry < entries)[:, None]
        offset = entry[:, None] * channels + column[None, :]
        grad_sum += tl.sum(tl.load(plain + offset, mask=mask, other=0.0), 0)
        weighted_sum += tl.sum(tl.load(weighted + offset, mask=mask, other=0.0), 0)
    set_offset = tl.program_id(0) * channels + column
    scale = tl.load(weight + column).to(tl.float32)
    center, inv_std = tl.load(mean + set_offset), tl.load(rstd + set_offset)
    scaled_sum, scaled_weighted_sum = scale * grad_sum, scale * weighted_sum
    if GROUPED:
        scaled_sum = tl.zeros([CHANNELS], tl.float32) + tl.sum(scaled_sum, 0)
        scaled_weighted_sum = tl.zeros([CHANNELS], tl.float32) + tl.sum(scaled_weighted_sum, 0)
    b = -inv_std * inv_std * inv_std * scaled_weighted_sum / count
    size = tl.num_programs(0) * channels
    tl.store(factors + set_offset, inv_std * scale)
    tl.store(factors + size + set_offset, b)
    tl.store(factors + 2 * size + set_offset, -inv_std * scaled_sum / count - b * center)
    tl.store(factors + 3 * size + set_offset, weighted_sum * inv_std)
    tl.store(factors + 4 * size + set_offset, grad_sum)


def norm_factors(
    sums: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, groups: int, pixels: int
) -> Tensor:
    """a, b and d, and the gradients of weight and bias per set of statistics: [5, S, C]."""
    _, images, parts, channels = sums.shape
    images_per_set = 1 if groups else images
    group_channels = channels // groups if groups else 1
    block = group_channels if groups else 8
    out = empty_factors(sums, groups)
    _finish_sums[(images // images_per_set, channels // block)](
        *sums, weight, mean, rstd, out,
        images_per_set * parts, channels, float(images_per_set * pixels * group_channels),
        bool(groups), min(256, triton.next_power_of_2(images_per_set * parts)), block,
    )  # fmt: skip
    return out
