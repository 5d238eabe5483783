"""The operators of `fused_norm.py` and `norm_mish.py`: what they take and return.

Their kernels are in `fused_norm_kernels.py`, `fused_pool_kernels.py` and `norm_mish_kernels.py`.

A plan runs them on the meta device, on machines that have neither a GPU nor Triton.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

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


def operator(
    name: str,
    schema: str,
    empty: Callable[..., Any],
    kernels: str = "fused_norm_kernels",
    package: str = "flexor.policies.nn",
) -> None:
    """`empty` makes the results without computing them; `kernels` is the module that computes them."""

    def run(*arguments: Any) -> Any:
        module = importlib.import_module(f"{package}.{kernels}")
        return getattr(module, name)(*arguments)

    torch.library.define(f"flexor::{name}", schema)
    torch.library.impl(
        f"flexor::{name}", ("cuda", "cpu"), run
    )  # the CPU's is Triton's interpreter, for tests
    torch.library.register_fake(f"flexor::{name}", empty)


operator(
    "norm_statistics",
    "(Tensor x, Tensor weight, Tensor bias, int groups, float eps) -> Tensor",
    lambda x, weight, bias, groups, eps: empty_statistics(x, groups),
)
operator(  # one of its own: torch.compile fails on one that may change arguments and is given None for them
    "norm_running_statistics",
    "(Tensor x, Tensor weight, Tensor bias, float eps, Tensor(a!) running_mean, Tensor(b!) running_var, "
    "float momentum) -> Tensor",
    lambda x, *_: empty_statistics(x, 0),
)
operator(
    "norm_apply",
    "(Tensor x, Tensor scale, Tensor shift, Tensor? residual, bool relu) -> Tensor",
    lambda x, *_: torch.empty_like(x),
)
operator(
    "norm_pool",
    "(Tensor x, Tensor scale, Tensor shift) -> (Tensor, Tensor)",
    lambda x, *_: empty_pooled(x),
    "fused_pool_kernels",
)
operator(
    "norm_sums",
    "(Tensor gradient, Tensor x, Tensor mean, Tensor? scale, Tensor? shift) -> Tensor",
    lambda gradient, x, *_: empty_sums(x),
)
operator(
    "norm_sums_residual",
    "(Tensor gradient, Tensor x, Tensor y, Tensor mean) -> (Tensor, Tensor)",
    lambda gradient, x, *_: (torch.empty_like(gradient), empty_sums(x)),
)
operator(
    "norm_pool_sums",
    "(Tensor gradient, Tensor index, Tensor x, Tensor mean) -> Tensor",
    lambda gradient, *_: gradient.new_empty(
        (2, gradient.shape[0], gradient.shape[2], gradient.shape[1]), dtype=torch.float32
    ),
    "fused_pool_kernels",
)
operator(
    "norm_factors",
    "(Tensor sums, Tensor weight, Tensor mean, Tensor rstd, int groups, int pixels) -> Tensor",
    lambda sums, weight, mean, rstd, groups, pixels: empty_factors(sums, groups),
)
operator(
    "norm_backward",
    "(Tensor gradient, Tensor? y, Tensor? x, Tensor a, Tensor? b, Tensor? d, Tensor? scale, Tensor? shift) "
    "-> Tensor",
    lambda gradient, *_: torch.empty_like(gradient),
)
operator(
    "norm_backward_residual",
    "(Tensor gradient, Tensor y, Tensor a) -> (Tensor, Tensor)",
    lambda gradient, *_: (torch.empty_like(gradient), torch.empty_like(gradient)),
)
operator(
    "norm_pool_backward",
    "(Tensor gradient, Tensor index, Tensor? x, Tensor a, Tensor? b, Tensor? d, int height, int width) "
    "-> Tensor",
    lambda gradient, index, x, a, b, d, height, width: empty_map(gradient, height, width),
    "fused_pool_kernels",
)
operator(
    "norm_mish",
    "(Tensor x, Tensor weight, Tensor bias, Tensor? film, Tensor? residual, int groups, float eps, "
    "ScalarType dtype) -> (Tensor, Tensor)",
    lambda x, weight, bias, film, residual, groups, eps, dtype: (
        torch.empty_like(x, dtype=dtype),
        empty_group_statistics(x, groups),
    ),
    "norm_mish_kernels",
)
operator(
    "norm_mish_backward",
    "(Tensor gradient, Tensor x, Tensor statistics, Tensor weight, Tensor bias, Tensor? film) "
    "-> (Tensor, Tensor, Tensor)",
    lambda gradient, x, statistics, weight, bias, film: (
        torch.empty_like(x),
        empty_parts(x),
        empty_film_gradient(x, film),
    ),
    "norm_mish_kernels",
)
