"""What language models compute between matrix products, in one kernel each: RMSNorm, RoPE, gate, short attention.

A chunk of actions is some 50 tokens that go through the same layers ten times: then the many small kernels of torch
take longer than the matrix products. The Triton kernels of `triton/language_model.py` have no backward pass, so they
are used only without gradients. Everywhere else, and on other devices, torch computes the same.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flexor.kernels.available import can_compile
from flexor.kernels.operator import define_operator

MODULE = "language_model"
LOW = (torch.bfloat16, torch.float16)
FEW = 128  # query tokens; with more, torch's kernels occupy a GPU

define_operator(
    "rms_norm",
    "(Tensor x, Tensor weight, float offset, float eps, ScalarType dtype, bool round_normed) -> Tensor",
    lambda x, weight, offset, eps, dtype, round_normed: torch.empty_like(x, dtype=dtype),
    MODULE,
)
define_operator(
    "rotate", "(Tensor x, Tensor cos, Tensor sin) -> Tensor", lambda x, *_: torch.empty_like(x), MODULE
)
define_operator(
    "gate", "(Tensor gate, Tensor up, bool gelu) -> Tensor", lambda gate, *_: torch.empty_like(gate), MODULE
)
define_operator(
    "attend_few",
    "(Tensor queries, Tensor keys, Tensor values, Tensor mask) -> Tensor",
    lambda queries, *_: torch.empty_like(queries),
    MODULE,
)


def _fuses(*tensors: Tensor) -> bool:
    """Whether the kernels can be used: on a GPU, without gradients. torch.compile fuses operations itself."""
    x = tensors[0]
    if not x.is_cuda or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return all(tensor.is_contiguous() for tensor in tensors) and can_compile(x.device)


def rms_norm(
    x: Tensor, weight: Tensor, offset: float, eps: float, dtype: torch.dtype, round_normed: bool = False
) -> Tensor:
    """RMSNorm of x [..., D] in float32, times (weight + offset) [D], cast to `dtype`.

    `round_normed`: it is rounded to the type of x before it is multiplied, as in Llama of `transformers`.
    """
    if _fuses(x, weight):
        return torch.ops.flexor.rms_norm(x, weight, offset, eps, dtype, round_normed)
    exact = torch.promote_types(x.dtype, torch.float32)
    scale = weight.to(exact) + offset if offset else weight.to(exact)
    if round_normed:
        return (F.rms_norm(x.to(exact), weight.shape, None, eps).to(x.dtype) * scale).to(dtype)
    return F.rms_norm(x.to(exact), weight.shape, scale, eps).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, S, heads, D], cos and sin [B or 1, S, 1, D]: channels i and i + D / 2 are a point that is rotated."""
    if _fuses(x, cos, sin):
        return torch.ops.flexor.rotate(x, cos, sin)
    partners = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos + partners * sin).to(x.dtype)


def gated(gate: Tensor, up: Tensor, by: Literal["gelu", "silu"]) -> Tensor:
    """activation(gate) * up; GELU is its tanh approximation."""
    if _fuses(gate, up):
        return torch.ops.flexor.gate(gate, up, by == "gelu")
    return (F.gelu(gate, approximate="tanh") if by == "gelu" else F.silu(gate)) * up


def can_attend_few(queries: Tensor, keys: Tensor) -> bool:
    """Whether `attend_few` supports these queries [B, Q, heads, D] and keys [B, K, kv_heads, D]."""
    width = queries.shape[-1]
    fits = width in (64, 128, 256) and queries.shape[1] <= FEW and queries.dtype == keys.dtype
    return fits and queries.dtype in LOW and _fuses(queries)


def attend_few(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention of few tokens to many, [B, Q, heads, D]; query heads share the keys and values of `kv_heads`.

    `mask` [B, 1, Q or 1, K] is False for hidden keys. Torch's kernels go through the keys of a head one after the
    other, on few of the GPU's multiprocessors.
    """
    return torch.ops.flexor.attend_few(queries, keys, values, mask)
