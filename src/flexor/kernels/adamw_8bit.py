"""AdamW with moments of 8 bits: a byte for each value, and a scale for every 256 of them, as in bitsandbytes.

A byte is a place in a table of 256 values between -1 and 1, or between 0 and 1 for the second moment: 0, 1, and seven
decades of which each has twice as many values as the one below. A moment is the value times the largest of its block.
Unlike there, a second moment that is not zero never becomes zero: a step would be divided by eps, and could be huge.
Blocks follow the values of a tensor row by row, whatever its layout in memory is. Without scales, moments are in
float32.

The Triton kernel of `triton/adamw_8bit.py` updates several tensors in one launch. It reads rate and step from the GPU's
memory, so a CUDA graph can contain it. `update` is the same computed by torch.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flexor.kernels.adam import complement
from flexor.kernels.operator import define_operator

BLOCK = 256  # values that share a scale
DECADES = 7
NEGATIVE = 127  # place of zero in the table with negative values

define_operator(
    "adamw_8bit",
    "(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] first, Tensor(c!)[] second, Tensor(d!)[] first_scales, "
    "Tensor(e!)[] second_scales, Tensor factors, Tensor? scale, Tensor? found_inf, float beta1, float beta2, float eps)"
    " -> ()",
    lambda *_: None,
    "adamw_8bit",
)


@functools.cache
def table(signed: bool, device: torch.device) -> Tensor:
    """The values that bytes stand for [256], ascending."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        centres = (10.0 ** (decade + 1 - DECADES) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += centres + [-centre for centre in centres if signed]
    return torch.tensor(sorted(values), device=device)


@functools.cache
def midpoints(signed: bool, device: torch.device) -> Tensor:
    """Between neighbours in the table, with infinities around them [257]: byte b is for values from b to b + 1."""
    values, infinity = table(signed, device), torch.full((1,), torch.inf, device=device)
    return torch.cat((-infinity, (values[:-1] + values[1:]) / 2, infinity))


def dequantize(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """uint8 of any shape and a scale for each block -> float32 [N]."""
    values = table(signed, codes.device)[codes.flatten().int()]
    return values * scales.repeat_interleave(BLOCK)[: values.numel()]


def quantize(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """float32 [N] -> the nearest bytes [N], and the scales of the blocks."""
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    relative = (blocks / torch.where(scales > 0, scales, 1)[:, None]).flatten()[: values.numel()]
    codes = torch.bucketize(relative, midpoints(signed, values.device)[1:-1])
    if signed:  # no negative moment becomes zero
        codes -= ((values < 0) & (codes == NEGATIVE)).int()
    else:  # nor does a second moment
        codes += ((values > 0) & (codes == 0)).int()
    return codes.to(torch.uint8), scales


def update(
    weights: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    first_scales: list[Tensor],
    second_scales: list[Tensor],
    factors: Tensor,
    scale: Tensor | None,
    found_inf: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """A step, in place. Without scales the moments are in float32.

    `factors` [tensors, 3]: bias-corrected step size, root of the second bias correction, 1 - lr * weight decay.
    `scale`: divides the gradients. `found_inf`: not 0 if this step is to be skipped.
    """
    if found_inf is not None and found_inf.item():
        return
    for number, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        rate, root, decay = factors[number]
        g = gradient.flatten().float()
        if scale is not None:
            g = g / scale
        moments = [first[number], second[number]]
        scales = [first_scales[number], second_scales[number]] if first_scales else []
        if scales:
            m, v = (dequantize(moments[i], scales[i], signed=i == 0) for i in (0, 1))
        else:
            m, v = (moment.flatten() for moment in moments)
        m = m * beta1 + complement(beta1) * g
        v = v * beta2 + complement(beta2) * g * g
        w = decay * weight.flatten().float() - rate * m / (v.sqrt() / root + eps)
        weight.copy_(w.view(weight.shape))
        for i, values in enumerate((m, v)):
            if scales:
                values, largest = quantize(values, signed=i == 0)
                scales[i].copy_(largest)
            moments[i].copy_(values.view(weight.shape))


def has_known_layout(weight: Tensor) -> bool:
    """Whether the kernel can update it: its values are in order, or [O, I, ...] with the channels I last."""
    return weight.is_contiguous() or (weight.dim() > 2 and weight.movedim(1, -1).is_contiguous())
