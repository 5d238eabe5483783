"""Triton kernels of the operators in `kernels/norm.py` for the forward pass. Those for the backward pass are in
`norm_backward.py`, those with pooling in `norm_pool.py`.

A feature map is [N, C, H, W] in channels-last layout: for each image, pixels are rows of C values. A program handles a
block of channels of some rows of one image. There are S sets of statistics, [S, C]: one for batch normalisation, one
per image for group normalisation. Sums over pixels are computed per program [N, P, C] and then added in a fixed order,
so that results do not change from run to run.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexor.kernels.norm_shapes import ROWS, empty_statistics, shape_of, split, stride

# Statistics.


@triton.jit
def _moments(x, means, squares, pixels, channels, parts, rows, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Mean and sum of squared deviations of each part of an image."""
    image, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    x += image.to(tl.int64) * pixels * channels
    # a value near the mean: little is lost to rounding
    pivot = tl.load(x + part * rows * channels + column).to(tl.float32)
    sums = tl.zeros([ROWS, CHANNELS], tl.float32)
    square_sums = tl.zeros([ROWS, CHANNELS], tl.float32)
    end = tl.minimum((part + 1) * rows, pixels)
    for first in range(part * rows, end, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < end)[:, None]
        value = tl.load(x + row[:, None] * channels + column[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.where(mask, value - pivot[None, :], 0.0)
        sums += value
        square_sums += value * value
    count = (end - part * rows).to(tl.float32)
    total = tl.sum(sums, 0)
    offset = tl.program_id(0) * channels + column
    tl.store(means + offset, pivot + total / count)
    tl.store(squares + offset, tl.maximum(tl.sum(square_sums, 0) - total * total / count, 0.0))


@triton.jit
def _finish_statistics(
    means, squares, weight, bias,
    out,  # mean, rstd, scale, shift: [4, S, C]
    running_mean, running_var,
    entries,  # parts of all images of a set
    pixels, channels, parts, rows, count, eps, momentum,
    GROUPED: tl.constexpr, RUNNING: tl.constexpr, ENTRIES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    means += tl.program_id(0) * entries * channels
    squares += tl.program_id(0) * entries * channels
    total = tl.zeros([CHANNELS], tl.float32)
    for first in range(0, entries, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        mask = (entry < entries)[:, None]
        size = tl.minimum(rows, pixels - (entry % parts) * rows).to(tl.float32)
        offset = entry[:, None] * channels + column[None, :]
        total += tl.sum(tl.load(means + offset, mask=mask, other=0.0) * size[:, None], 0)
    if GROUPED:
        total = tl.zeros([CHANNELS], tl.float32) + tl.sum(total, 0)
    mean = total / count
    square_sum = tl.zeros([CHANNELS], tl.float32)
    for first in range(0, entries, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        mask = (entry < entries)[:, None]
        size = tl.minimum(rows, pixels - (entry % parts) * rows).to(tl.float32)
        offset = entry[:, None] * channels + column[None, :]
        deviation = tl.load(means + offset, mask=mask, other=0.0) - mean[None, :]
        part_squares = tl.load(squares + offset, mask=mask, other=0.0) + deviation * deviation * size[:, None]
        square_sum += tl.sum(tl.where(mask, part_squares, 0.0), 0)
    if GROUPED:
        square_sum = tl.zeros([CHANNELS], tl.float32) + tl.sum(square_sum, 0)
    rstd = 1.0 / tl.sqrt(square_sum / count + eps)
    scale = tl.load(weight + column).to(tl.float32) * rstd
    shift = tl.load(bias + column).to(tl.float32) - mean * scale
    offset = tl.program_id(0) * channels + column
    stride = tl.num_programs(0) * channels
    tl.store(out + offset, mean)
    tl.store(out + stride + offset, rstd)
    tl.store(out + 2 * stride + offset, scale)
    tl.store(out + 3 * stride + offset, shift)
    if RUNNING:
        previous = tl.load(running_mean + column)
        tl.store(running_mean + column, previous + momentum * (mean - previous))
        previous = tl.load(running_var + column)
        tl.store(running_var + column, previous + momentum * (square_sum / (count - 1) - previous))


def norm_statistics(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    momentum: float = 0.0,
) -> Tensor:
    """Mean, 1/std, scale and shift: [4, S, C]. `groups`: per image and group of channels; 0: over the batch."""
    images, channels, pixels = shape_of(x)
    parts, rows, width = split(images, channels, pixels)
    partial = x.new_empty((2, images * parts, channels), dtype=torch.float32)
    _moments[(images * parts, channels // width)](x, *partial, pixels, channels, parts, rows, ROWS, width)
    images_per_set = 1 if groups else images
    group_channels = channels // groups if groups else 1
    block = group_channels if groups else 8
    out = empty_statistics(x, groups)
    _finish_statistics[(images // images_per_set, channels // block)](
        *partial, weight, bias, out, running_mean, running_var,
        images_per_set * parts, pixels, channels, parts, rows,
        float(images_per_set * pixels * group_channels), eps, momentum,
        bool(groups), running_mean is not None, min(256, triton.next_power_of_2(images_per_set * parts)), block,
    )  # fmt: skip
    return out


def norm_running_statistics(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
) -> Tensor:
    """The same over the batch; also updates the running statistics."""
    return norm_statistics(x, weight, bias, 0, eps, running_mean, running_var, momentum)


# Forward.


@triton.jit
def _apply(
    x, scale, shift, residual, y,
    pixels, channels, parts, rows, stride,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    image, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    start = image.to(tl.int64) * pixels * channels
    factor = tl.load(scale + image * stride + column)[None, :]
    bias = tl.load(shift + image * stride + column)[None, :]
    end = tl.minimum((part + 1) * rows, pixels)
    for first in range(part * rows, end, ROWS):
        row = first + tl.arange(0, ROWS)
        offset = start + row[:, None] * channels + column[None, :]
        mask = (row < end)[:, None]
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) * factor + bias
        if RESIDUAL:
            value += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(y + offset, value, mask=mask)


def norm_apply(x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """relu(x * scale + shift + residual)"""
    images, channels, pixels = shape_of(x)
    parts, rows, width = split(images, channels, pixels)
    y = torch.empty_like(x)
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last)
    _apply[(images * parts, channels // width)](
        x, scale, shift, residual, y,
        pixels, channels, parts, rows, stride(scale),
        residual is not None, relu, ROWS, width,
    )  # fmt: skip
    return y
