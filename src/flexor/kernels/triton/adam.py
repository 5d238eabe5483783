"""The Triton kernel of the operator `adam_with_copies` in `kernels/adam.py`.

A tensor has a launch of its own. Each of its values is read and written once, which is what the time goes to. Values of
the tensors are in the same order in memory, whatever their layout. Everything is computed in float32.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

VALUES = 1024  # of a program


@triton.jit(do_not_specialize=["row"])
def _adam(
    weight,
    gradient,
    average,
    square,
    copy,
    factors,
    scale,
    row,
    count,
    new1,  # share of the gradient in the average
    new2,  # and of its square
    eps,
    decay,
    SCALED: tl.constexpr,
    VALUES: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    inside = at < count
    factors += 3 * row
    rate, root, keep = tl.load(factors), tl.load(factors + 1), tl.load(factors + 2)
    w = tl.load(weight + at, mask=inside, other=0.0)
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(average + at, mask=inside, other=0.0)
    v = tl.load(square + at, mask=inside, other=0.0)
    if SCALED:
        g = tl.div_rn(g, tl.load(scale))
    g += decay * w
    m += new1 * (g - m)
    v += new2 * (g * g - v)
    w = keep * w - tl.div_rn(rate * m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    tl.store(weight + at, w, mask=inside)
    tl.store(average + at, m, mask=inside)
    tl.store(square + at, v, mask=inside)
    tl.store(copy + at, w.to(copy.dtype.element_ty), mask=inside)


def adam_with_copies(
    weights: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    copies: list[Tensor],
    factors: Tensor,
    scale: Tensor | None,
    new1: float,
    new2: float,
    eps: float,
    decay: float,
) -> None:
    """`factors` [tensors, 3]: learning rate and root of the bias corrections, and what weight decay leaves."""
    for row, tensors in enumerate(zip(weights, gradients, averages, squares, copies, strict=True)):
        count = tensors[0].numel()
        _adam[(triton.cdiv(count, VALUES),)](
            *tensors, factors, scale, row, count, new1, new2, eps, decay, scale is not None, VALUES
        )
