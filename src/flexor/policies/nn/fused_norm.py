"""Normalisation, residual, ReLU and pooling of a ResNet, in one pass over a feature map on NVIDIA GPUs.

`norm_relu` and `norm_relu_pool` compute what their plain versions below do. Feature maps of images are large, and
torch reads and writes them once per operation. The Triton kernels of `flexor.kernels` read and write them once,
or twice where statistics are needed first. They take maps in channels-last layout on a GPU. Everything else, such as
batch normalisation over several ranks, runs the plain version.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.kernels.available import DTYPES, has_kernels
from flexor.kernels.norm import AffineRelu, NormRelu
from flexor.policies.nn.batchnorm import BatchNorm2d, recomputing


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
        return _normalize(norm, x, residual, relu, pool=False)
    x = norm(x)
    if residual is not None:
        x = x + residual
    return F.relu(x, inplace=True) if relu else x


def norm_relu_pool(norm: nn.Module, x: Tensor) -> Tensor:
    """The maximum of relu(norm(x)) in 3x3 windows with stride 2."""
    if _fused(norm, x):
        return _normalize(norm, x, None, True, pool=True)
    return F.max_pool2d(F.relu(norm(x), inplace=True), 3, 2, 1)


def _fused(norm: nn.Module, x: Tensor) -> bool:
    """Whether the kernels can be used."""
    if x.dtype not in DTYPES or x.shape[1] % 16 or not _supported(norm):
        return False
    return x.is_contiguous(memory_format=torch.channels_last) and has_kernels(x.device)


def _supported(norm: nn.Module) -> bool:
    """Whether there are kernels for this normalisation, as it is used now."""
    if isinstance(norm, BatchNorm2d):
        if not norm.training:
            return not torch.is_grad_enabled()
        return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    if isinstance(norm, nn.GroupNorm):
        group = norm.num_channels // norm.num_groups
        return norm.affine and group & (group - 1) == 0
    return isinstance(norm, FrozenBatchNorm2d)


def _normalize(norm: Any, x: Tensor, residual: Tensor | None, relu: bool, pool: bool) -> Tensor:
    if isinstance(norm, FrozenBatchNorm2d) or (isinstance(norm, BatchNorm2d) and not norm.training):
        with torch.no_grad():
            scale, shift = (each[None] for each in scale_and_shift(norm))
        return AffineRelu.apply(x, scale, shift, residual, relu, pool)
    groups: int = 0
    running: tuple[Any, ...] = ()
    if isinstance(norm, nn.GroupNorm):
        groups = norm.num_groups
    elif not recomputing():
        running = norm.running_mean, norm.running_var, norm.momentum
        norm.num_batches_tracked.add_(1)
    return NormRelu.apply(x, norm.weight, norm.bias, residual, relu, pool, groups, norm.eps, *running)
