"""Group normalisation, Mish, FiLM and residual of a 1-D U-Net, in one pass over a sequence.

`norm_mish` computes what `plain` does. torch runs a kernel per operation and three for the normalisation, all in
float32 under autocast. The Triton kernels of `triton/norm_mish.py` read and write each sequence once. They
compute in float32 too, and round the result to its type at the end. They take sequences in any memory layout.
Everything else, such as a group that exceeds one program, runs the plain version.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.kernels.available import DTYPES, has_kernels
from flexor.kernels.norm_shapes import empty_film_gradient, empty_group_statistics, empty_parts
from flexor.kernels.operator import define_operator

LARGEST = 16384  # values of a group, which a program holds in registers

define_operator(
    "norm_mish",
    "(Tensor x, Tensor weight, Tensor bias, Tensor? film, Tensor? residual, int groups, float eps, "
    "ScalarType dtype) -> (Tensor, Tensor)",
    lambda x, weight, bias, film, residual, groups, eps, dtype: (
        torch.empty_like(x, dtype=dtype),
        empty_group_statistics(x, groups),
    ),
    "norm_mish",
)
define_operator(
    "norm_mish_backward",
    "(Tensor gradient, Tensor x, Tensor statistics, Tensor weight, Tensor bias, Tensor? film) "
    "-> (Tensor, Tensor, Tensor)",
    lambda gradient, x, statistics, weight, bias, film: (
        torch.empty_like(x),
        empty_parts(x),
        empty_film_gradient(x, film),
    ),
    "norm_mish",
)


def norm_mish(
    norm: nn.Module,
    x: Tensor,
    film: Tensor | None = None,
    residual: Tensor | None = None,
    rounded: bool = False,
) -> Tensor:
    """film(mish(norm(x))) + residual, for x [B, C, T].

    `film` is a shift of each channel [B, C], or a factor and a shift [B, 2 * C].
    `rounded`: a convolution reads the result. Under autocast that is float32, which the convolution would round.
    """
    assert isinstance(norm, nn.GroupNorm)
    if not _fused(norm, x, film, residual):
        return plain(norm, x, film, residual)
    wide = torch.is_autocast_enabled(x.device.type) and not rounded
    dtype = torch.float32 if wide else x.dtype
    if residual is not None:
        dtype = torch.promote_types(dtype, residual.dtype)
    return _NormMish.apply(x, norm.weight, norm.bias, film, residual, norm.num_groups, norm.eps, dtype)


def plain(norm: nn.GroupNorm, x: Tensor, film: Tensor | None, residual: Tensor | None) -> Tensor:
    x = F.mish(norm(x))
    if film is not None and film.shape[1] == 2 * x.shape[1]:
        scale, shift = film[..., None].chunk(2, dim=1)
        x = scale * x + shift
    elif film is not None:
        x = x + film[..., None]
    return x if residual is None else x + residual


def _fused(norm: nn.GroupNorm, x: Tensor, film: Tensor | None, residual: Tensor | None) -> bool:
    """Whether the kernels can be used."""
    if not norm.affine:
        return False
    if any(tensor is not None and tensor.dtype not in DTYPES for tensor in (x, film, residual)):
        return False
    if residual is not None and residual.shape != x.shape:
        return False
    if _power_of_two(x.shape[2]) * _power_of_two(x.shape[1] // norm.num_groups) > LARGEST:
        return False
    return has_kernels(x.device)


def _power_of_two(value: int) -> int:
    """The smallest power of two that is not less than the value."""
    return 1 << (value - 1).bit_length()


class _NormMish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        film: Tensor | None,
        residual: Tensor | None,
        groups: int,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        y, statistics = torch.ops.flexor.norm_mish(x, weight, bias, film, residual, groups, eps, dtype)
        ctx.save_for_backward(x, statistics, weight, bias, film)
        ctx.residual = None if residual is None else residual.dtype
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, statistics, weight, bias, film = ctx.saved_tensors
        dx, parts, dfilm = torch.ops.flexor.norm_mish_backward(gradient, x, statistics, weight, bias, film)
        dweight, dbias = parts.sum(1).unbind()
        param_grads = dweight.to(weight.dtype), dbias.to(bias.dtype)
        residual_grad = None
        if ctx.residual is not None and ctx.needs_input_grad[4]:
            residual_grad = gradient.to(ctx.residual)
        return dx, *param_grads, None if film is None else dfilm, residual_grad, None, None, None
