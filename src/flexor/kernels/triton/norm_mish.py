"""Triton kernels of the operators `norm_mish` and `norm_mish_backward`.

Sequences are [B, C, T] in any memory layout. A program handles one group of channels of one sample, so that it
reads them once: a tile of T rows and the group's channels. Everything is computed in float32. Sums over time are
per sample and channel; torch adds them over samples in a fixed order, so that results do not change from run to run.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexor.kernels.norm_shapes import empty_film_gradient, empty_group_statistics, empty_parts

LINEAR = tl.constexpr(20.0)  # above, mish(x) is x in float32


@triton.jit
def _load_tile(pointer, sample, stride_b, stride_c, stride_t, channel, step, mask):
    """[T, C] in float32; the strides are those of [B, C, T]."""
    offset = sample.to(tl.int64) * stride_b + step[:, None] * stride_t + channel[None, :] * stride_c
    return tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_tile(pointer, value, sample, stride_b, stride_c, stride_t, channel, step, mask):
    offset = sample.to(tl.int64) * stride_b + step[:, None] * stride_t + channel[None, :] * stride_c
    tl.store(pointer + offset, value, mask=mask)


@triton.jit
def _tanh_of_softplus(x):
    """mish(x) = x * tanh(log(1 + exp(x))), and the derivative of the second factor, without large exponents.

    With e = exp(x) and n = e * (e + 2), it is n / (n + 2), and its derivative 4 * e * (1 + e) / (n + 2)^2.
    """
    e = tl.exp(tl.minimum(x, LINEAR))
    n = e * (e + 2)
    return n / (n + 2), 4 * e * (1 + e) / ((n + 2) * (n + 2))


@triton.jit
def _forward(
    x, weight, bias, film, residual, y, statistics,
    x_b, x_c, x_t, residual_b, residual_c, residual_t, y_b, y_c, y_t,
    samples, groups, group_channels, length,
    count,  # values of a group
    eps,
    FILM: tl.constexpr,  # factors per channel: 0, 1 (added) or 2 (multiplied, added)
    RESIDUAL: tl.constexpr, STEPS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    sample, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    step = tl.arange(0, STEPS)
    column = tl.arange(0, CHANNELS)
    channel = group * group_channels + column
    channel_mask = column < group_channels
    mask = (step < length)[:, None] & channel_mask[None, :]
    value = _load_tile(x, sample, x_b, x_c, x_t, channel, step, mask)
    mean = tl.sum(tl.sum(value, 0), 0) / count
    centered = tl.where(mask, value - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(tl.sum(centered * centered, 0), 0) / count + eps)
    tl.store(statistics + tl.program_id(0), mean)
    tl.store(statistics + samples * groups + tl.program_id(0), rstd)
    scale = tl.load(weight + channel, mask=channel_mask, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=channel_mask, other=0.0).to(tl.float32)
    z = centered * rstd * scale[None, :] + shift[None, :]
    factor, _ = _tanh_of_softplus(z)
    output = z * factor
    channels = groups * group_channels
    if FILM == 2:
        row = film + sample * 2 * channels + channel
        output = output * tl.load(row, mask=channel_mask, other=0.0).to(tl.float32)[None, :]
        output += tl.load(row + channels, mask=channel_mask, other=0.0).to(tl.float32)[None, :]
    if FILM == 1:
        row = film + sample * channels + channel
        output += tl.load(row, mask=channel_mask, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        output += _load_tile(residual, sample, residual_b, residual_c, residual_t, channel, step, mask)
    _store_tile(y, output, sample, y_b, y_c, y_t, channel, step, mask)


@triton.jit
def _backward(
    gradient, x, statistics, weight, bias, film, dx, parts, dfilm,
    gradient_b, gradient_c, gradient_t, x_b, x_c, x_t, dx_b, dx_c, dx_t,
    samples, groups, group_channels, length, count,
    FILM: tl.constexpr, STEPS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    sample, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    step = tl.arange(0, STEPS)
    column = tl.arange(0, CHANNELS)
    channel = group * group_channels + column
    channel_mask = column < group_channels
    mask = (step < length)[:, None] & channel_mask[None, :]
    channels = groups * group_channels
    mean = tl.load(statistics + tl.program_id(0))
    rstd = tl.load(statistics + samples * groups + tl.program_id(0))
    scale = tl.load(weight + channel, mask=channel_mask, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=channel_mask, other=0.0).to(tl.float32)
    value = _load_tile(x, sample, x_b, x_c, x_t, channel, step, mask)
    normalized = tl.where(mask, (value - mean) * rstd, 0.0)
    z = normalized * scale[None, :] + shift[None, :]
    factor, slope = _tanh_of_softplus(z)
    g = _load_tile(gradient, sample, gradient_b, gradient_c, gradient_t, channel, step, mask)
    if FILM == 2:
        row = sample * 2 * channels + channel
        tl.store(dfilm + row, tl.sum(g * z * factor, 0), mask=channel_mask)
        tl.store(dfilm + row + channels, tl.sum(g, 0), mask=channel_mask)
        g *= tl.load(film + row, mask=channel_mask, other=0.0).to(tl.float32)[None, :]
    if FILM == 1:
        tl.store(dfilm + sample * channels + channel, tl.sum(g, 0), mask=channel_mask)
    g *= tl.where(z > LINEAR, 1.0, factor + z * slope)
    weight_grad, bias_grad = tl.sum(g * normalized, 0), tl.sum(g, 0)
    row = sample * channels + channel
    tl.store(parts + row, weight_grad, mask=channel_mask)
    tl.store(parts + samples * channels + row, bias_grad, mask=channel_mask)
    projection = tl.sum(weight_grad * scale, 0) / count
    mean_grad = tl.sum(bias_grad * scale, 0) / count
    input_grad = rstd * (g * scale[None, :] - mean_grad - normalized * projection)
    _store_tile(dx, input_grad, sample, dx_b, dx_c, dx_t, channel, step, mask)


def _tile(x: Tensor, groups: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a program's tile."""
    steps = triton.next_power_of_2(x.shape[2])
    channels = triton.next_power_of_2(x.shape[1] // groups)
    return steps, channels, min(16, max(1, steps * channels // 512))


def _film_factors(x: Tensor, film: Tensor | None) -> int:
    return 0 if film is None else film.shape[1] // x.shape[1]


def norm_mish(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    film: Tensor | None,
    residual: Tensor | None,
    groups: int,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """film(mish(group_norm(x))) + residual, and the mean and 1/std of each group: [2, B, groups]."""
    samples, channels, length = x.shape
    y, statistics = torch.empty_like(x, dtype=dtype), empty_group_statistics(x, groups)
    steps, width, warps = _tile(x, groups)
    _forward[(samples * groups,)](
        x, weight, bias, film if film is None else film.contiguous(), residual, y, statistics,
        *x.stride(), *(x if residual is None else residual).stride(), *y.stride(),
        samples, groups, channels // groups, length, float(channels // groups * length), eps,
        _film_factors(x, film), residual is not None,
        steps, width,
        num_warps=warps,
    )  # fmt: skip
    return y, statistics


def norm_mish_backward(
    gradient: Tensor, x: Tensor, statistics: Tensor, weight: Tensor, bias: Tensor, film: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of weight and bias for each sample [2, B, C], and of film."""
    samples, channels, length = x.shape
    groups = statistics.shape[2]
    dx, parts, dfilm = torch.empty_like(x), empty_parts(x), empty_film_gradient(x, film)
    steps, width, warps = _tile(x, groups)
    _backward[(samples * groups,)](
        gradient, x, statistics, weight, bias, film if film is None else film.contiguous(), dx, parts, dfilm,
        *gradient.stride(), *x.stride(), *dx.stride(),
        samples, groups, channels // groups, length, float(channels // groups * length),
        _film_factors(x, film),
        steps, width,
        num_warps=warps,
    )  # fmt: skip
    return dx, parts, dfilm
