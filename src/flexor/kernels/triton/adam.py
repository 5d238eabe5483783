"""The Triton kernel of the operator `adam_with_copies` in `kernels/adam.py`.

One launch per tensor. Each value is read and written once: the kernel is bound by memory bandwidth. Weight, gradient
and state have the same memory layout. Everything is computed in float32.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

VALUES = 1024  # of a program


@triton.jit(do_not_specialize=["row"])
def _adam(
    weight, gradient, average, square, copy, factors, scale,
    row, count, one_minus_beta1, one_minus_beta2, eps, decay,
    SCALED: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    mask = index < count
    factors += 3 * row
    step_size, bias_correction, decay_factor = tl.load(factors), tl.load(factors + 1), tl.load(factors + 2)
    w = tl.load(weight + index, mask=mask, other=0.0)
    g = tl.load(gradient + index, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(average + index, mask=mask, other=0.0)
    v = tl.load(square + index, mask=mask, other=0.0)
    if SCALED:
        g = tl.div_rn(g, tl.load(scale))
    g += decay * w
    m += one_minus_beta1 * (g - m)
    v += one_minus_beta2 * (g * g - v)
    w = decay_factor * w - tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), bias_correction) + eps)
    tl.store(weight + index, w, mask=mask)
    tl.store(average + index, m, mask=mask)
    tl.store(square + index, v, mask=mask)
    tl.store(copy + index, w.to(copy.dtype.element_ty), mask=mask)


def adam_with_copies(
    weights: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    copies: list[Tensor],
    factors: Tensor,
    scale: Tensor | None,
    one_minus_beta1: float,
    one_minus_beta2: float,
    eps: float,
    decay: float,
) -> None:
    """`factors` [tensors, 3]: bias-corrected step size, root of the second bias correction, 1 - lr * weight decay."""
    for row, tensors in enumerate(zip(weights, gradients, averages, squares, copies, strict=True)):
        count = tensors[0].numel()
        scalars = count, one_minus_beta1, one_minus_beta2, eps, decay
        _adam[(triton.cdiv(count, VALUES),)](
            *tensors, factors, scale, row, *scalars, scale is not None, VALUES
        )
