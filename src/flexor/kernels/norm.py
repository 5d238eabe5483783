"""Normalisation, residual, ReLU and max pooling of a ResNet, in one pass over a feature map.

A plan runs the operators on the meta device, on machines that have neither a GPU nor Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexor.kernels.norm_shapes import empty_factors, empty_map, empty_pooled, empty_statistics, empty_sums
from flexor.kernels.operator import define_operator

define_operator(
    "norm_statistics",
    "(Tensor x, Tensor weight, Tensor bias, int groups, float eps) -> Tensor",
    lambda x, weight, bias, groups, eps: empty_statistics(x, groups),
    "norm",
)
define_operator(  # separate: torch.compile fails on operators that mutate optional arguments
    "norm_running_statistics",
    "(Tensor x, Tensor weight, Tensor bias, float eps, Tensor(a!) running_mean, Tensor(b!) running_var, "
    "float momentum) -> Tensor",
    lambda x, *_: empty_statistics(x, 0),
    "norm",
)
define_operator(
    "norm_apply",
    "(Tensor x, Tensor scale, Tensor shift, Tensor? residual, bool relu) -> Tensor",
    lambda x, *_: torch.empty_like(x),
    "norm",
)
define_operator(
    "norm_pool",
    "(Tensor x, Tensor scale, Tensor shift) -> (Tensor, Tensor)",
    lambda x, *_: empty_pooled(x),
    "norm_pool",
)
define_operator(
    "norm_sums",
    "(Tensor gradient, Tensor x, Tensor mean, Tensor? scale, Tensor? shift) -> Tensor",
    lambda gradient, x, *_: empty_sums(x),
    "norm_backward",
)
define_operator(
    "norm_sums_residual",
    "(Tensor gradient, Tensor x, Tensor y, Tensor mean) -> (Tensor, Tensor)",
    lambda gradient, x, *_: (torch.empty_like(gradient), empty_sums(x)),
    "norm_backward",
)
define_operator(
    "norm_pool_sums",
    "(Tensor gradient, Tensor index, Tensor x, Tensor mean) -> Tensor",
    lambda gradient, *_: gradient.new_empty(
        (2, gradient.shape[0], gradient.shape[2], gradient.shape[1]), dtype=torch.float32
    ),
    "norm_pool",
)
define_operator(
    "norm_factors",
    "(Tensor sums, Tensor weight, Tensor mean, Tensor rstd, int groups, int pixels) -> Tensor",
    lambda sums, weight, mean, rstd, groups, pixels: empty_factors(sums, groups),
    "norm_backward",
)
define_operator(
    "norm_backward",
    "(Tensor gradient, Tensor? y, Tensor? x, Tensor a, Tensor? b, Tensor? d, Tensor? scale, Tensor? shift) "
    "-> Tensor",
    lambda gradient, *_: torch.empty_like(gradient),
    "norm_backward",
)
define_operator(
    "norm_backward_residual",
    "(Tensor gradient, Tensor y, Tensor a) -> (Tensor, Tensor)",
    lambda gradient, *_: (torch.empty_like(gradient), torch.empty_like(gradient)),
    "norm_backward",
)
define_operator(
    "norm_pool_backward",
    "(Tensor gradient, Tensor index, Tensor? x, Tensor a, Tensor? b, Tensor? d, int height, int width) "
    "-> Tensor",
    lambda gradient, index, x, a, b, d, height, width: empty_map(gradient, height, width),
    "norm_pool",
)


class AffineRelu(torch.autograd.Function):
    """relu(x * scale + shift + residual), with constant scale and shift [1, C]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None, relu: bool, pool: bool
    ) -> Tensor:
        ctx.pool, ctx.size = pool, x.shape[2:]
        if pool:
            y, taps = torch.ops.flexor.norm_pool(x, scale, shift)
            ctx.save_for_backward(scale, taps)
            return y
        y = torch.ops.flexor.norm_apply(x, scale, shift, residual, relu)
        ctx.save_for_backward(scale, y if relu else None)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        if ctx.pool:
            scale, taps = ctx.saved_tensors
            dx = torch.ops.flexor.norm_pool_backward(gradient, taps, None, scale, None, None, *ctx.size)
            return dx, None, None, None, None, None
        scale, y = ctx.saved_tensors
        needs_residual_grad = ctx.needs_input_grad[3]
        if needs_residual_grad and y is not None:
            dx, masked = torch.ops.flexor.norm_backward_residual(gradient, y, scale)
        else:
            dx = torch.ops.flexor.norm_backward(gradient, y, None, scale, None, None, None, None)
            masked = gradient if needs_residual_grad else None
        return dx, None, None, masked, None, None


class NormRelu(torch.autograd.Function):
    """The same with scale and shift from the statistics of x: over the batch, or over groups of channels."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        residual: Tensor | None,
        relu: bool,
        pool: bool,
        groups: int,  # 0: over the batch
        eps: float,
        *running: Any,  # running_mean, running_var and momentum, if they are tracked
    ) -> Tensor:
        ctx.groups = groups
        if running:
            statistics = torch.ops.flexor.norm_running_statistics(x, weight, bias, eps, *running)
        else:
            statistics = torch.ops.flexor.norm_statistics(x, weight, bias, groups, eps)
        mean, rstd, scale, shift = statistics
        if pool:
            y, taps = torch.ops.flexor.norm_pool(x, scale, shift)
            ctx.save_for_backward(x, weight, mean, rstd, None, None, None, taps)
            return y
        y = torch.ops.flexor.norm_apply(x, scale, shift, residual, relu)
        # y tells where ReLU was zero; without a residual, x does, with its scale
        relu_y, relu_scale = (None, scale) if residual is None else (y, None)
        ctx.save_for_backward(
            x, weight, mean, rstd, relu_scale if relu else None, shift, relu_y if relu else None, None
        )
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        x, weight, mean, rstd, scale, shift, y, taps = ctx.saved_tensors
        ops, masked = torch.ops.flexor, gradient
        if taps is not None:
            sums = ops.norm_pool_sums(gradient, taps, x, mean)
        elif y is not None:
            masked, sums = ops.norm_sums_residual(gradient, x, y, mean)
        else:
            sums = ops.norm_sums(gradient, x, mean, scale, shift)
        *factors, dweight, dbias = ops.norm_factors(sums, weight, mean, rstd, ctx.groups, x[0, 0].numel())
        if taps is not None:
            dx = ops.norm_pool_backward(gradient, taps, x, *factors, *x.shape[2:])
        else:
            dx = ops.norm_backward(masked, None, x, *factors, scale, shift)
        param_grads = _total(dweight, weight), _total(dbias, weight)
        residual_grad = masked if ctx.needs_input_grad[3] else None
        return dx, *param_grads, residual_grad, *[None] * (len(ctx.needs_input_grad) - 4)


def _total(per_set: Tensor, like: Tensor) -> Tensor:
    """The gradient [C] of a parameter, summed over the sets of statistics [S, C]."""
    return (per_set[0] if len(per_set) == 1 else per_set.sum(0)).to(like.dtype)
