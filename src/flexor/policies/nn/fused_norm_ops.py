"""The operators of `fused_norm.py` and `norm_mish.py`: what they take and return.

Their kernels are in `fused_norm_kernels.py`, `fused_norm_backward_kernels.py`, `fused_pool_kernels.py` and
`norm_mish_kernels.py`.

A plan runs them on the meta device, on machines that have neither a GPU nor Triton.
"""

from __future__ import annotations

import torch

from flexor.policies.nn.fused_norm_shapes import (
    empty_factors,
    empty_film_gradient,
    empty_group_statistics,
    empty_map,
    empty_parts,
    empty_pooled,
    empty_statistics,
    empty_sums,
)
from flexor.policies.nn.triton_operator import define_operator

NORM = "flexor.policies.nn.fused_norm_kernels"
BACKWARD = "flexor.policies.nn.fused_norm_backward_kernels"
POOL = "flexor.policies.nn.fused_pool_kernels"
MISH = "flexor.policies.nn.norm_mish_kernels"

define_operator(
    "norm_statistics",
    "(Tensor x, Tensor weight, Tensor bias, int groups, float eps) -> Tensor",
    lambda x, weight, bias, groups, eps: empty_statistics(x, groups),
    NORM,
)
define_operator(  # one of its own: torch.compile fails on one that may change arguments and is given None for them
    "norm_running_statistics",
    "(Tensor x, Tensor weight, Tensor bias, float eps, Tensor(a!) running_mean, Tensor(b!) running_var, "
    "float momentum) -> Tensor",
    lambda x, *_: empty_statistics(x, 0),
    NORM,
)
define_operator(
    "norm_apply",
    "(Tensor x, Tensor scale, Tensor shift, Tensor? residual, bool relu) -> Tensor",
    lambda x, *_: torch.empty_like(x),
    NORM,
)
define_operator(
    "norm_pool",
    "(Tensor x, Tensor scale, Tensor shift) -> (Tensor, Tensor)",
    lambda x, *_: empty_pooled(x),
    POOL,
)
define_operator(
    "norm_sums",
    "(Tensor gradient, Tensor x, Tensor mean, Tensor? scale, Tensor? shift) -> Tensor",
    lambda gradient, x, *_: empty_sums(x),
    BACKWARD,
)
define_operator(
    "norm_sums_residual",
    "(Tensor gradient, Tensor x, Tensor y, Tensor mean) -> (Tensor, Tensor)",
    lambda gradient, x, *_: (torch.empty_like(gradient), empty_sums(x)),
    BACKWARD,
)
define_operator(
    "norm_pool_sums",
    "(Tensor gradient, Tensor index, Tensor x, Tensor mean) -> Tensor",
    lambda gradient, *_: gradient.new_empty(
        (2, gradient.shape[0], gradient.shape[2], gradient.shape[1]), dtype=torch.float32
    ),
    POOL,
)
define_operator(
    "norm_factors",
    "(Tensor sums, Tensor weight, Tensor mean, Tensor rstd, int groups, int pixels) -> Tensor",
    lambda sums, weight, mean, rstd, groups, pixels: empty_factors(sums, groups),
    BACKWARD,
)
define_operator(
    "norm_backward",
    "(Tensor gradient, Tensor? y, Tensor? x, Tensor a, Tensor? b, Tensor? d, Tensor? scale, Tensor? shift) "
    "-> Tensor",
    lambda gradient, *_: torch.empty_like(gradient),
    BACKWARD,
)
define_operator(
    "norm_backward_residual",
    "(Tensor gradient, Tensor y, Tensor a) -> (Tensor, Tensor)",
    lambda gradient, *_: (torch.empty_like(gradient), torch.empty_like(gradient)),
    BACKWARD,
)
define_operator(
    "norm_pool_backward",
    "(Tensor gradient, Tensor index, Tensor? x, Tensor a, Tensor? b, Tensor? d, int height, int width) "
    "-> Tensor",
    lambda gradient, index, x, a, b, d, height, width: empty_map(gradient, height, width),
    POOL,
)
define_operator(
    "norm_mish",
    "(Tensor x, Tensor weight, Tensor bias, Tensor? film, Tensor? residual, int groups, float eps, "
    "ScalarType dtype) -> (Tensor, Tensor)",
    lambda x, weight, bias, film, residual, groups, eps, dtype: (
        torch.empty_like(x, dtype=dtype),
        empty_group_statistics(x, groups),
    ),
    MISH,
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
    MISH,
)
