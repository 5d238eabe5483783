"""Kernels that are fused on CUDA. The meta device would split them and store the parts, so they are defined here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("flexor_plan", "DEF")
LIBRARY.define("mish_backward(Tensor gradient, Tensor x) -> Tensor")
LIBRARY.define("rms_norm(Tensor x, int dims, Tensor? weight) -> (Tensor, Tensor)")
LIBRARY.define(
    "rms_norm_backward(Tensor gradient, Tensor x, Tensor root, Tensor? weight) -> (Tensor, Tensor)"
)


def _rms_norm(x: Tensor, dims: int, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = [*x.shape[: x.dim() - dims], *[1] * dims]
    return torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)


def _rms_norm_backward(
    gradient: Tensor, x: Tensor, root: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(0) if weight is None else torch.empty_like(weight)


LIBRARY.impl("mish_backward", lambda gradient, x: torch.empty_like(x), "Meta")
LIBRARY.impl("rms_norm", _rms_norm, "Meta")
LIBRARY.impl("rms_norm_backward", _rms_norm_backward, "Meta")


class Mish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.ops.aten.mish(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.ops.flexor_plan.mish_backward(gradient, *ctx.saved_tensors)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        out, root = torch.ops.flexor_plan.rms_norm(x, dims, weight)
        ctx.save_for_backward(x, root, *([] if weight is None else [weight]))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, root, *weight = ctx.saved_tensors
        of_x, of_weight = torch.ops.flexor_plan.rms_norm_backward(gradient, x, root, *(weight or [None]))
        return of_x, of_weight if weight else None, None
