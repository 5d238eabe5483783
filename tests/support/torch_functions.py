"""Functions that a policy may call, each once: what autocast makes of them is compared in `test_cuda_on_meta.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _names(text: str) -> list[str]:
    return text.split()


ALONE = _names(
    "abs acos asin ceil clamp_min cos cosh cumprod cumsum erf erfinv exp expm1 isnan log log10 log1p "
    "log2 log_softmax mean neg norm prod reciprocal relu rsqrt sigmoid sign sin sinh softmax sqrt square "
    "std sum tan tanh tril var"
)
PAIR = _names("add atan2 bmm div dist lerp logaddexp matmul maximum mul sub tensordot")
ACTIVATIONS = _names("elu gelu hardtanh leaky_relu logsigmoid mish relu6 silu softplus softsign tanhshrink")
LOSSES = _names(
    "binary_cross_entropy_with_logits huber_loss l1_loss mse_loss smooth_l1_loss soft_margin_loss"
)
DIMENSION = {"cumprod", "cumsum", "log_softmax", "softmax"}
MODES = ("nearest", "nearest-exact", "bilinear", "bicubic")

Function = Callable[[Tensor, Tensor], Any]  # of two alike tensors [4, 4, 4]


def _alone(name: str) -> Function:
    arguments = [-1] if name in DIMENSION else [0.0] if name == "clamp_min" else []
    return lambda x, y: getattr(x, name)(*arguments)


def _pair(name: str) -> Function:
    more = [0.5] if name == "lerp" else []
    return lambda x, y: getattr(torch, name)(x, y, *more)


FUNCTIONS: dict[str, Function] = {
    **{name: _alone(name) for name in ALONE},
    **{name: _pair(name) for name in PAIR},
    **{name: lambda x, y, name=name: getattr(F, name)(x) for name in ACTIVATIONS},  # type: ignore[misc]
    **{name: lambda x, y, name=name: getattr(F, name)(x, y) for name in LOSSES},  # type: ignore[misc]
    **{
        f"interpolate {mode}": lambda x, y, mode=mode: F.interpolate(x[None], (8, 8), mode=mode)  # type: ignore[misc]
        for mode in MODES
    },
    "interpolate linear": lambda x, y: F.interpolate(x, 8, mode="linear"),
    "@": lambda x, y: x @ y,
    "** 2": lambda x, y: x**2,
    "2 **": lambda x, y: 2**x,
    "pow": lambda x, y: x.pow(3),
    "addbmm": lambda x, y: torch.addbmm(x[0], x, y),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "addmm": lambda x, y: torch.addmm(x[0], x[1], y[0]),
    "baddbmm": lambda x, y: torch.baddbmm(x, x, y),
    "cat": lambda x, y: torch.cat([x, y]),
    "cdist": lambda x, y: torch.cdist(x, y),
    "conv1d": lambda x, y: F.conv1d(x, y),
    "conv2d": lambda x, y: F.conv2d(x[None], y[None, :, :2, :2]),
    "conv_transpose1d": lambda x, y: F.conv_transpose1d(x, y),
    "cosine_similarity": lambda x, y: F.cosine_similarity(x, y),
    "cross": lambda x, y: torch.linalg.cross(x[..., :3], y[..., :3]),
    "cross_entropy": lambda x, y: F.cross_entropy(x[0], torch.zeros_like(x[0, 0], dtype=torch.int64)),
    "dropout": lambda x, y: F.dropout(x, 0.1),
    "einsum": lambda x, y: torch.einsum("bij,bkj->bik", x, y),
    "group_norm": lambda x, y: F.group_norm(x, 2),
    "grid_sample": lambda x, y: F.grid_sample(x[None], y[None, ..., :2], align_corners=False),
    "kl_div": lambda x, y: F.kl_div(x, y, reduction="batchmean"),
    "layer_norm": lambda x, y: F.layer_norm(x, (4,)),
    "linalg.multi_dot": lambda x, y: torch.linalg.multi_dot([x[0], y[0], x[1]]),
    "linalg.norm": lambda x, y: torch.linalg.norm(x),
    "linalg.vector_norm": lambda x, y: torch.linalg.vector_norm(x, dim=-1),
    "linear": lambda x, y: F.linear(x, y[0]),
    "logsumexp": lambda x, y: x.logsumexp(-1),
    "normalize": lambda x, y: F.normalize(x),
    "one wide": lambda x, y: x * y.float(),
    "outer": lambda x, y: torch.outer(x[0, 0], y[0, 0]),
    "pairwise_distance": lambda x, y: F.pairwise_distance(x, y),
    "prelu": lambda x, y: F.prelu(x, y[0, 0]),
    "rms_norm": lambda x, y: F.rms_norm(x, (4,)),
    "scatter_add": lambda x, y: x.scatter_add(-1, torch.zeros_like(x, dtype=torch.int64), y),
    "stack": lambda x, y: torch.stack([x, y]),
    "var_mean": lambda x, y: torch.var_mean(x, -1),
    "where": lambda x, y: torch.where(x > 0, x, y),
}


def types(device: torch.device, lower: torch.dtype = torch.bfloat16) -> dict[str, list[str]]:
    """Types that come of each function under autocast, from float32 and from the lower type."""
    types = {}
    inputs = [torch.ones(4, 4, 4, dtype=dtype, device=device) for dtype in (torch.float32, lower)]
    with torch.autocast(device.type, lower):
        for name, call in FUNCTIONS.items():
            results = [call(x, x) for x in inputs]
            tensors = [r for each in results for r in (each if isinstance(each, tuple) else (each,))]
            types[name] = [str(tensor.dtype) for tensor in tensors]
    return types
