"""Normalisation, ReLU and what stands next to them in a ResNet, in one pass over a feature map, on NVIDIA GPUs.

`norm_relu` and `norm_relu_pool` compute what their plain versions below say. Feature maps of images are large, and
torch reads and writes them once per operation. The Triton kernels of `fused_norm_kernels.py` read and write them once,
or twice where statistics are needed first. They take maps in channels-last layout on a GPU. Everything else, such as
batch normalisation over several ranks, runs the plain version.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import flexor.policies.nn.fused_norm_ops  # noqa: F401 (defines the operators)
from flexor.core.log import log
from flexor.policies.nn.batchnorm import BatchNorm2d, recomputing

TYPES = (torch.float32, torch.bfloat16, torch.float16)


class FrozenBatchNorm2d(nn.Module):
    """Batch normalisation with fixed statistics: an affine map per channel, nothing to train."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:  # [B, C, H, W]
        # in the input's precision: under autocast a float32 scale would widen every feature map
        scale, shift = (each.to(x.dtype).view(1, -1, 1, 1) for each in scale_and_shift(self))
        return torch.addcmul(shift, x, scale)


def scale_and_shift(norm: Any) -> tuple[Tensor, Tensor]:
    """Batch normalisation by running statistics is x * scale + shift, per channel."""
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    return scale, norm.bias - norm.running_mean * scale


def norm_relu(norm: nn.Module, x: Tensor, residual: Tensor | None = None, relu: bool = True) -> Tensor:
    """relu(norm(x) + residual)"""
    if _fused(norm, x) and (residual is None or (residual.dtype, residual.shape) == (x.dtype, x.shape)):
        return _normalised(norm, x, residual, relu, pool=False)
    x = norm(x)
    if residual is not None:
        x = x + residual
    return F.relu(x, inplace=True) if relu else x


def norm_relu_pool(norm: nn.Module, x: Tensor) -> Tensor:
    """The maximum of relu(norm(x)) in windows of 3 by 3 pixels, at every second pixel."""
    if _fused(norm, x):
        return _normalised(norm, x, None, True, pool=True)
    return F.max_pool2d(F.relu(norm(x), inplace=True), 3, 2, 1)


@functools.cache
def kernels_compile(device: torch.device) -> bool:
    """Whether Triton can compile for this device: it needs a C compiler on the machine. Warns once if it can't."""
    ones = torch.ones((1, 16), device=device)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            torch.ops.flexor.norm_apply(ones.view(1, 16, 1, 1), ones, ones, None, True)
    except Exception as error:  # whatever stops Triton, torch has kernels too
        reason = str(error).strip().splitlines() or [type(error).__name__]
        log.warning(
            "Triton can't compile Flexor's kernels for normalisation (%s): PyTorch's are used, which are slower.",
            reason[0].rstrip("."),
        )
        return False
    return True


def _fused(norm: nn.Module, x: Tensor) -> bool:
    """Whether the kernels can do it. On the meta device, a plan asks what a GPU does."""
    if x.device.type not in ("cuda", "meta") or x.dtype not in TYPES or x.shape[1] % 16:
        return False
    if not x.is_contiguous(memory_format=torch.channels_last) or not _known(norm):
        return False
    return not x.is_cuda or torch.compiler.is_compiling() or kernels_compile(x.device)


def _known(norm: nn.Module) -> bool:
    """Whether there are kernels for this normalisation, as it is used now."""
    if isinstance(norm, BatchNorm2d):
        if not norm.training:
            return not torch.is_grad_enabled()
        return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    if isinstance(norm, nn.GroupNorm):
        group = norm.num_channels // norm.num_groups
        return norm.affine and group & (group - 1) == 0
    return isinstance(norm, FrozenBatchNorm2d)


def _normalised(norm: Any, x: Tensor, residual: Tensor | None, relu: bool, pool: bool) -> Tensor:
    if isinstance(norm, FrozenBatchNorm2d) or (isinstance(norm, BatchNorm2d) and not norm.training):
        with torch.no_grad():
            scale, shift = (each[None] for each in scale_and_shift(norm))
        return _Affine.apply(x, scale, shift, residual, relu, pool)
    groups: int = 0
    running: tuple[Any, ...] = ()
    if isinstance(norm, nn.GroupNorm):
        groups = norm.num_groups
    elif not recomputing():
        running = norm.running_mean, norm.running_var, norm.momentum
        norm.num_batches_tracked.add_(1)
    return _Normalise.apply(x, norm.weight, norm.bias, residual, relu, pool, groups, norm.eps, *running)


class _Affine(torch.autograd.Function):
    """relu(x * scale + shift + residual), with scale and shift [1, C] that are not trained."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None, relu: bool, pool: bool
    ) -> Tensor:
        ctx.pool, ctx.size = pool, x.shape[2:]
        if pool:
            y, index = torch.ops.flexor.norm_pool(x, scale, shift)
            ctx.save_for_backward(scale, index)
            return y
        y = torch.ops.flexor.norm_apply(x, scale, shift, residual, relu)
        ctx.save_for_backward(scale, y if relu else None)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        if ctx.pool:
            scale, index = ctx.saved_tensors
            dx = torch.ops.flexor.norm_pool_backward(gradient, index, None, scale, None, None, *ctx.size)
            return dx, None, None, None, None, None
        scale, y = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3]
        if wanted and y is not None:
            dx, masked = torch.ops.flexor.norm_backward_residual(gradient, y, scale)
        else:
            dx = torch.ops.flexor.norm_backward(gradient, y, None, scale, None, None, None, None)
            masked = gradient if wanted else None
        return dx, None, None, masked, None, None


class _Normalise(torch.autograd.Function):
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
        *running: Any,  # running_mean, running_var and momentum, if they are kept
    ) -> Tensor:
        ctx.relu, ctx.pool, ctx.groups, ctx.residual = relu, pool, groups, residual is not None
        if running:
            statistics = torch.ops.flexor.norm_running_statistics(x, weight, bias, eps, *running)
        else:
            statistics = torch.ops.flexor.norm_statistics(x, weight, bias, groups, eps)
        mean, rstd, scale, shift = statistics
        if pool:
            y, index = torch.ops.flexor.norm_pool(x, scale, shift)
            ctx.save_for_backward(x, weight, mean, rstd, index)
            return y
        y = torch.ops.flexor.norm_apply(x, scale, shift, residual, relu)
        # without a residual, x says where ReLU was zero
        ctx.save_for_backward(x, weight, mean, rstd, scale, shift, y if relu and ctx.residual else None)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        if ctx.pool:
            dx, dweight, dbias = _pool_backward(gradient, ctx.groups, *ctx.saved_tensors)
            return dx, dweight, dbias, *[None] * (len(ctx.needs_input_grad) - 3)
        x, weight, mean, rstd, scale, shift, y = ctx.saved_tensors
        masked = gradient
        relu = ctx.relu
        if y is not None:
            masked, sums = torch.ops.flexor.norm_sums_residual(gradient, x, y, mean)
            relu = False
        else:
            sums = torch.ops.flexor.norm_sums(gradient, x, mean, scale if relu else None, shift)
        *factors, dweight, dbias = torch.ops.flexor.norm_factors(
            sums, weight, mean, rstd, ctx.groups, x[0, 0].numel()
        )
        dx = torch.ops.flexor.norm_backward(masked, None, x, *factors, scale if relu else None, shift)
        wanted = ctx.residual and ctx.needs_input_grad[3]
        trained = _total(dweight, weight), _total(dbias, weight)
        return dx, *trained, masked if wanted else None, *[None] * (len(ctx.needs_input_grad) - 4)


def _pool_backward(
    gradient: Tensor,
    groups: int,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    index: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    sums = torch.ops.flexor.norm_pool_sums(gradient, index, x, mean)
    *factors, dweight, dbias = torch.ops.flexor.norm_factors(
        sums, weight, mean, rstd, groups, x[0, 0].numel()
    )
    dx = torch.ops.flexor.norm_pool_backward(gradient, index, x, *factors, *x.shape[2:])
    return dx, _total(dweight, weight), _total(dbias, weight)


def _total(per_set: Tensor, like: Tensor) -> Tensor:
    """The gradient [C] of a parameter, from that of each set of statistics [S, C]."""
    return (per_set[0] if len(per_set) == 1 else per_set.sum(0)).to(like.dtype)
