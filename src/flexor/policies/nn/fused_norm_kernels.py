"""Triton kernels of the operators in `fused_norm_ops.py`; those with pooling are in `fused_pool_kernels.py`.

A feature map is [N, C, H, W] in channels-last layout: for each image, pixels are rows of C values. A program works on a
block of channels of some rows of one image. What depends on the statistics is [S, C]: S is 1 if all images share
them (batch normalisation), N if each image has its own (group normalisation). Sums over pixels are first made per
program [N, P, C] and then added up in a fixed order, so that results do not change from run to run.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexor.policies.nn.fused_norm_shapes import (
    ROWS,
    empty_factors,
    empty_statistics,
    empty_sums,
    shape_of,
    split,
)


def stride(per_image: Tensor) -> int:
    """From the statistics of one image to those of the next."""
    return 0 if per_image.shape[0] == 1 else per_image.shape[1]


# Statistics.


@triton.jit
def _moments(x, means, squares, pixels, channels, parts, rows, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Mean and sum of squared deviations of each part."""
    image, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    x += image.to(tl.int64) * pixels * channels
    pivot = tl.load(x + part * rows * channels + column).to(
        tl.float32
    )  # near the mean: little is lost to rounding
    one = tl.zeros([ROWS, CHANNELS], tl.float32)
    two = tl.zeros([ROWS, CHANNELS], tl.float32)
    end = tl.minimum((part + 1) * rows, pixels)
    for first in range(part * rows, end, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < end)[:, None]
        value = tl.load(x + row[:, None] * channels + column[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - pivot[None, :], 0.0)
        one += value
        two += value * value
    count = (end - part * rows).to(tl.float32)
    total = tl.sum(one, 0)
    at = tl.program_id(0) * channels + column
    tl.store(means + at, pivot + total / count)
    tl.store(squares + at, tl.maximum(tl.sum(two, 0) - total * total / count, 0.0))


@triton.jit
def _finish_statistics(
    means,
    squares,
    weight,
    bias,
    out,  # mean, rstd, scale, shift: [4, S, C]
    running_mean,
    running_var,
    entries,  # parts of all images that share statistics
    pixels,
    channels,
    parts,
    rows,
    count,
    eps,
    momentum,
    GROUPED: tl.constexpr,
    RUNNING: tl.constexpr,
    ENTRIES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    means += tl.program_id(0) * entries * channels
    squares += tl.program_id(0) * entries * channels
    total = tl.zeros([CHANNELS], tl.float32)
    for first in range(0, entries, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        inside = (entry < entries)[:, None]
        size = tl.minimum(rows, pixels - (entry % parts) * rows).to(tl.float32)
        at = entry[:, None] * channels + column[None, :]
        total += tl.sum(tl.load(means + at, mask=inside, other=0.0) * size[:, None], 0)
    if GROUPED:
        total = tl.zeros([CHANNELS], tl.float32) + tl.sum(total, 0)
    mean = total / count
    square = tl.zeros([CHANNELS], tl.float32)
    for first in range(0, entries, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        inside = (entry < entries)[:, None]
        size = tl.minimum(rows, pixels - (entry % parts) * rows).to(tl.float32)
        at = entry[:, None] * channels + column[None, :]
        away = tl.load(means + at, mask=inside, other=0.0) - mean[None, :]
        more = tl.load(squares + at, mask=inside, other=0.0) + away * away * size[:, None]
        square += tl.sum(tl.where(inside, more, 0.0), 0)
    if GROUPED:
        square = tl.zeros([CHANNELS], tl.float32) + tl.sum(square, 0)
    rstd = 1.0 / tl.sqrt(square / count + eps)
    scale = tl.load(weight + column).to(tl.float32) * rstd
    shift = tl.load(bias + column).to(tl.float32) - mean * scale
    at = tl.program_id(0) * channels + column
    size_of_one = tl.num_programs(0) * channels
    tl.store(out + at, mean)
    tl.store(out + size_of_one + at, rstd)
    tl.store(out + 2 * size_of_one + at, scale)
    tl.store(out + 3 * size_of_one + at, shift)
    if RUNNING:
        before = tl.load(running_mean + column)
        tl.store(running_mean + column, before + momentum * (mean - before))
        before = tl.load(running_var + column)
        tl.store(running_var + column, before + momentum * (square / (count - 1) - before))


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
    _moments[(images * parts, channels // width)](
        x, partial[0], partial[1], pixels, channels, parts, rows, ROWS, width
    )
    shared = 1 if groups else images
    together = channels // groups if groups else 1
    block = together if groups else 8
    out = empty_statistics(x, groups)
    _finish_statistics[(images // shared, channels // block)](
        partial[0],
        partial[1],
        weight,
        bias,
        out,
        running_mean,
        running_var,
        shared * parts,
        pixels,
        channels,
        parts,
        rows,
        float(shared * pixels * together),
        eps,
        momentum,
        bool(groups),
        running_mean is not None,
        min(256, triton.next_power_of_2(shared * parts)),
        block,
    )
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
    """The same over the batch; also moves the running statistics."""
    return norm_statistics(x, weight, bias, 0, eps, running_mean, running_var, momentum)


# Forward.


@triton.jit
def _apply(
    x,
    scale,
    shift,
    residual,
    y,
    pixels,
    channels,
    parts,
    rows,
    stride,
    RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    image, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    start = image.to(tl.int64) * pixels * channels
    factor = tl.load(scale + image * stride + column)[None, :]
    offset = tl.load(shift + image * stride + column)[None, :]
    end = tl.minimum((part + 1) * rows, pixels)
    for first in range(part * rows, end, ROWS):
        row = first + tl.arange(0, ROWS)
        at = start + row[:, None] * channels + column[None, :]
        inside = (row < end)[:, None]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * factor + offset
        if RESIDUAL:
            value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(y + at, value, mask=inside)


def norm_apply(x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """relu(x * scale + shift + residual)"""
    images, channels, pixels = shape_of(x)
    parts, rows, width = split(images, channels, pixels)
    y = torch.empty_like(x)
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last)
    _apply[(images * parts, channels // width)](
        x,
        scale,
        shift,
        residual,
        y,
        pixels,
        channels,
        parts,
        rows,
        stride(scale),
        residual is not None,
        relu,
        ROWS,
        width,
    )
    return y


# Backward. Of y = relu(x * scale + shift + residual), with g = dy where y > 0:
#   dx = a * g + b * x + d      [S, C] each; b and d are 0 if the statistics are fixed
#   dresidual = g


@triton.jit
def _backward(
    gradient,
    y,
    x,
    a,
    b,
    d,
    scale,
    shift,
    dx,
    masked,
    pixels,
    channels,
    parts,
    rows,
    stride,
    MASK_Y: tl.constexpr,
    MASK_X: tl.constexpr,
    USE_X: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    image, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    start = image.to(tl.int64) * pixels * channels
    own = image * stride + column
    factor = tl.load(a + own)[None, :]
    if USE_X:
        slope, offset = tl.load(b + own)[None, :], tl.load(d + own)[None, :]
    if MASK_X:
        scaled, shifted = tl.load(scale + own)[None, :], tl.load(shift + own)[None, :]
    end = tl.minimum((part + 1) * rows, pixels)
    for first in range(part * rows, end, ROWS):
        row = first + tl.arange(0, ROWS)
        at = start + row[:, None] * channels + column[None, :]
        inside = (row < end)[:, None]
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        if MASK_Y:
            g = tl.where(tl.load(y + at, mask=inside, other=0.0) > 0, g, 0.0)
        if USE_X:
            value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            if MASK_X:
                g = tl.where(value * scaled + shifted > 0, g, 0.0)
            result = factor * g + slope * value + offset
        else:
            result = factor * g
        tl.store(dx + at, result, mask=inside)
        if KEEP:
            tl.store(masked + at, g, mask=inside)


def _run_backward(
    gradient: Tensor,
    y: Tensor | None,
    x: Tensor | None,
    a: Tensor,
    b: Tensor | None,
    d: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    masked: Tensor | None,
) -> Tensor:
    images, channels, pixels = shape_of(gradient)
    parts, rows, width = split(images, channels, pixels)
    dx = torch.empty_like(gradient)
    _backward[(images * parts, channels // width)](
        gradient,
        y,
        x,
        a,
        b,
        d,
        scale,
        shift,
        dx,
        masked,
        pixels,
        channels,
        parts,
        rows,
        stride(a),
        y is not None,
        scale is not None,
        x is not None,
        masked is not None,
        ROWS,
        width,
    )
    return dx


def norm_backward(
    gradient: Tensor,
    y: Tensor | None,
    x: Tensor | None,
    a: Tensor,
    b: Tensor | None,
    d: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
) -> Tensor:
    """dx. `y`, or `x` with `scale`, says where ReLU was zero; without them there is none."""
    return _run_backward(gradient, y, x, a, b, d, scale, shift, None)


def norm_backward_residual(gradient: Tensor, y: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """dx and dresidual, with fixed statistics."""
    masked = torch.empty_like(gradient)
    return _run_backward(gradient, y, None, a, None, None, None, None, masked), masked


@triton.jit
def _sums(
    gradient,
    x,
    y,
    mean,
    scale,
    shift,
    masked,
    plain,
    weighted,
    pixels,
    channels,
    parts,
    rows,
    stride,
    MASK_Y: tl.constexpr,
    MASK_X: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The sums of g and of g * (x - mean) of each part. With MASK_Y, g is stored too."""
    image, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    start = image.to(tl.int64) * pixels * channels
    own = image * stride + column
    centre = tl.load(mean + own)[None, :]
    if MASK_X:
        scaled, shifted = tl.load(scale + own)[None, :], tl.load(shift + own)[None, :]
    one = tl.zeros([ROWS, CHANNELS], tl.float32)
    two = tl.zeros([ROWS, CHANNELS], tl.float32)
    end = tl.minimum((part + 1) * rows, pixels)
    for first in range(part * rows, end, ROWS):
        row = first + tl.arange(0, ROWS)
        at = start + row[:, None] * channels + column[None, :]
        inside = (row < end)[:, None]
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if MASK_Y:
            g = tl.where(tl.load(y + at, mask=inside, other=0.0) > 0, g, 0.0)
            tl.store(masked + at, g, mask=inside)
        if MASK_X:
            g = tl.where(value * scaled + shifted > 0, g, 0.0)
        one += g
        two += g * (value - centre)
    at = tl.program_id(0) * channels + column
    tl.store(plain + at, tl.sum(one, 0))
    tl.store(weighted + at, tl.sum(two, 0))


def _run_sums(
    gradient: Tensor,
    x: Tensor,
    y: Tensor | None,
    mean: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    masked: Tensor | None,
) -> Tensor:
    images, channels, pixels = shape_of(x)
    parts, rows, width = split(images, channels, pixels)
    sums = empty_sums(x)
    _sums[(images * parts, channels // width)](
        gradient,
        x,
        y,
        mean,
        scale,
        shift,
        masked,
        sums[0],
        sums[1],
        pixels,
        channels,
        parts,
        rows,
        stride(mean),
        y is not None,
        scale is not None,
        ROWS,
        width,
    )
    return sums


def norm_sums(gradient: Tensor, x: Tensor, mean: Tensor, scale: Tensor | None, shift: Tensor) -> Tensor:
    """The sums of g and of g * (x - mean): [2, N, P, C]. Without `scale` there is no ReLU."""
    return _run_sums(gradient, x, None, mean, scale, shift, None)


def norm_sums_residual(gradient: Tensor, x: Tensor, y: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """g, and the sums."""
    masked = torch.empty_like(gradient)
    return masked, _run_sums(gradient, x, y, mean, None, None, masked)


@triton.jit
def _finish_sums(
    plain,
    weighted,
    weight,
    mean,
    rstd,
    factors,  # a, b, d, and the gradients of weight and bias: [5, S, C]
    entries,
    channels,
    count,
    GROUPED: tl.constexpr,
    ENTRIES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    plain += tl.program_id(0) * entries * channels
    weighted += tl.program_id(0) * entries * channels
    one = tl.zeros([CHANNELS], tl.float32)
    two = tl.zeros([CHANNELS], tl.float32)
    for first in range(0, entries, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        inside = (entry < entries)[:, None]
        at = entry[:, None] * channels + column[None, :]
        one += tl.sum(tl.load(plain + at, mask=inside, other=0.0), 0)
        two += tl.sum(tl.load(weighted + at, mask=inside, other=0.0), 0)
    own = tl.program_id(0) * channels + column
    scale = tl.load(weight + column).to(tl.float32)
    centre, spread = tl.load(mean + own), tl.load(rstd + own)
    first_sum, second_sum = scale * one, scale * two
    if GROUPED:
        first_sum = tl.zeros([CHANNELS], tl.float32) + tl.sum(first_sum, 0)
        second_sum = tl.zeros([CHANNELS], tl.float32) + tl.sum(second_sum, 0)
    b = -spread * spread * spread * second_sum / count
    size = tl.num_programs(0) * channels
    tl.store(factors + own, spread * scale)
    tl.store(factors + size + own, b)
    tl.store(factors + 2 * size + own, -spread * first_sum / count - b * centre)
    tl.store(factors + 3 * size + own, two * spread)
    tl.store(factors + 4 * size + own, one)


def norm_factors(
    sums: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, groups: int, pixels: int
) -> Tensor:
    """a, b and d, and the gradients of weight and bias per set of statistics: [5, S, C]."""
    _, images, parts, channels = sums.shape
    shared = 1 if groups else images
    together = channels // groups if groups else 1
    block = together if groups else 8
    out = empty_factors(sums, groups)
    _finish_sums[(images // shared, channels // block)](
        sums[0],
        sums[1],
        weight,
        mean,
        rstd,
        out,
        shared * parts,
        channels,
        float(shared * pixels * together),
        bool(groups),
        min(256, triton.next_power_of_2(shared * parts)),
        block,
    )
    return out
