"""What language models compute between matrix products, in one kernel each: RMSNorm, RoPE, gate, short attention.

torch has several kernels for each of them, and keeps what is between them for the backward pass, some of it in float32.
The Triton kernels of `triton/language_model.py` read and write each value once, and keep their inputs. `attend_few` has
no backward pass: it is for predictions. Everywhere else, and on other devices, torch computes the same.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flexor.kernels.available import DTYPES, can_compile, has_kernels
from flexor.kernels.operator import define_operator

MODULE = "language_model"
LOW = (torch.bfloat16, torch.float16)
FEW = 128  # query tokens; with more, torch's kernels occupy a GPU
NORM_TILE = 1024  # values of a program of RMSNorm, at least one row
NORM_PROGRAMS = 512  # of its backward pass: each adds up the gradients of the weights over its rows


def norm_rows(width: int) -> int:
    """Rows in a tile of RMSNorm."""
    return max(1, NORM_TILE // (1 << (width - 1).bit_length()))


def norm_programs(x: Tensor) -> int:
    """Programs of the backward pass of RMSNorm."""
    width = x.shape[-1]
    return min(NORM_PROGRAMS, -(-(x.numel() // width) // norm_rows(width)))


define_operator(
    "rms_norm",
    "(Tensor x, Tensor weight, float offset, float eps, ScalarType dtype, bool round_normed) "
    "-> (Tensor, Tensor)",
    lambda x, weight, offset, eps, dtype, round_normed: (
        torch.empty_like(x, dtype=dtype),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
    ),
    MODULE,
)
define_operator(
    "rms_norm_backward",
    "(Tensor gradient, Tensor x, Tensor weight, Tensor inverse_rms, float offset, bool round_normed) "
    "-> (Tensor, Tensor)",
    lambda gradient, x, *_: (
        torch.empty_like(x),
        x.new_empty((norm_programs(x), x.shape[-1]), dtype=torch.float32),
    ),
    MODULE,
)
define_operator(
    "rotate",
    "(Tensor x, Tensor cos, Tensor sin, bool back) -> Tensor",
    lambda x, *_: torch.empty_like(x),
    MODULE,
)
define_operator(
    "gate", "(Tensor gate, Tensor up, bool gelu) -> Tensor", lambda gate, *_: torch.empty_like(gate), MODULE
)
define_operator(
    "gate_backward",
    "(Tensor gradient, Tensor gate, Tensor up, bool gelu) -> (Tensor, Tensor)",
    lambda gradient, gate, up, gelu: (torch.empty_like(gate), torch.empty_like(up)),
    MODULE,
)
define_operator(
    "attend_few",
    "(Tensor queries, Tensor keys, Tensor values, Tensor mask) -> Tensor",
    lambda queries, *_: torch.empty_like(queries),
    MODULE,
)


def _fused(*tensors: Tensor) -> bool:
    """Whether the kernels can be used. torch.compile fuses the operations itself."""
    if torch.compiler.is_compiling() or not has_kernels(tensors[0].device):
        return False
    return all(tensor.dtype in DTYPES and tensor.is_contiguous() for tensor in tensors)


def rms_norm(
    x: Tensor, weight: Tensor, offset: float, eps: float, dtype: torch.dtype, round_normed: bool = False
) -> Tensor:
    """RMSNorm of x [..., D] in float32, times (weight + offset) [D], cast to `dtype`.

    `round_normed`: it is rounded to the type of x before it is multiplied, as in Llama of `transformers`.
    """
    if _fused(x, weight):
        return _RMSNorm.apply(x, weight, offset, eps, dtype, round_normed)
    exact = torch.promote_types(x.dtype, torch.float32)
    scale = weight.to(exact) + offset if offset else weight.to(exact)
    if round_normed:
        return (F.rms_norm(x.to(exact), weight.shape, None, eps).to(x.dtype) * scale).to(dtype)
    return F.rms_norm(x.to(exact), weight.shape, scale, eps).to(dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        offset: float,
        eps: float,
        dtype: torch.dtype,
        round_normed: bool,
    ) -> Tensor:
        normed, inverse_rms = torch.ops.flexor.rms_norm(x, weight, offset, eps, dtype, round_normed)
        ctx.save_for_backward(x, weight, inverse_rms)
        ctx.rounding = offset, round_normed
        return normed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, inverse_rms = ctx.saved_tensors
        dx, parts = torch.ops.flexor.rms_norm_backward(
            gradient.contiguous(), x, weight, inverse_rms, *ctx.rounding
        )
        dweight = parts.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dweight, None, None, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, S, heads, D], cos and sin [B or 1, S, 1, D]: channels i and i + D / 2 are a point that is rotated."""
    if _fused(x, cos, sin):
        return _Rotate.apply(x, cos, sin)
    partners = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos + partners * sin).to(x.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return torch.ops.flexor.rotate(x, cos, sin, False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.ops.flexor.rotate(gradient.contiguous(), *ctx.saved_tensors, True), None, None


def gated(gate: Tensor, up: Tensor, by: Literal["gelu", "silu"]) -> Tensor:
    """activation(gate) * up; GELU is its tanh approximation."""
    if gate.dtype == up.dtype and _fused(gate, up):
        return _Gated.apply(gate, up, by == "gelu")
    return (F.gelu(gate, approximate="tanh") if by == "gelu" else F.silu(gate)) * up


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.gelu = gelu
        return torch.ops.flexor.gate(gate, up, gelu)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return *torch.ops.flexor.gate_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.gelu), None


def can_attend_few(queries: Tensor, keys: Tensor) -> bool:
    """Whether `attend_few` supports these queries [B, Q, heads, D] and keys [B, K, kv_heads, D]."""
    if not queries.is_cuda or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    width = queries.shape[-1]
    fits = width in (64, 128, 256) and queries.shape[1] <= FEW and queries.dtype == keys.dtype
    return fits and queries.dtype in LOW and queries.is_contiguous() and can_compile(queries.device)


def attend_few(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention of few tokens to many, [B, Q, heads, D]; query heads share the keys and values of `kv_heads`.

    `mask` [B, 1, Q or 1, K] is False for hidden keys. Torch's kernels go through the keys of a head one after the
    other, on few of the GPU's multiprocessors.
    """
    return torch.ops.flexor.attend_few(queries, keys, values, mask)
