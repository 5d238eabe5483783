"""The Triton kernel of the operator `adamw_8bit` in `kernels/adamw_8bit.py`.

A program computes some blocks of one tensor. A launch updates several small tensors: pointers are arguments, from which
each program chooses its tensor's, so that a CUDA graph holds them. A large tensor has a launch of its own. All is
computed in float32. The places of new moments in the table are estimated, and corrected by comparing with the values
between which they lie: that is exact, and faster than a search.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexor.kernels import adamw_8bit as tables
from flexor.kernels.adam import complement

ROWS = 4  # blocks of a program
GROUP = 16  # tensors of a launch
LARGE = 1 << 20  # values of a tensor that has a launch of its own
FIELDS = 5  # of a tensor in `places`

BLOCK = tl.constexpr(tables.BLOCK)
ZERO = tl.constexpr(tables.NEGATIVE)
LAST = tl.constexpr(tables.DECADES - 1.0)  # decade: from 0.1 to 1
LOG10_OF_2 = tl.constexpr(0.30102999566398)
LOG2_OF_10 = tl.constexpr(3.32192809488736)


@triton.jit
def _quantize(values, scales, midpoints, SIGNED: tl.constexpr):
    """The nearest places in the table. A decade of the table has 2, 4, 8, ... values, half of them negative if any."""
    x = tl.div_rn(values, tl.where(scales > 0, scales, 1.0)[:, None])
    size = tl.abs(x)
    decade = tl.minimum(tl.maximum(tl.floor(tl.log2(size) * LOG10_OF_2 + (LAST + 1.0)), 0.0), LAST)
    place = (size * tl.exp2((decade - LAST) * -LOG2_OF_10) + 0.8) / 0.9  # from 1 to 2 in a decade
    if SIGNED:
        steps = tl.floor(tl.exp2(decade) * place)
        code = tl.where(x < 0, -steps, steps).to(tl.int32) + ZERO
    else:
        code = tl.floor(tl.exp2(decade + 1.0) * place).to(tl.int32) - 1
    code = tl.minimum(tl.maximum(code, 0), 255)
    code += (x > tl.load(midpoints + code + 1)).to(tl.int32)
    code -= (x <= tl.load(midpoints + code)).to(tl.int32)
    if SIGNED:
        code -= ((values < 0) & (code == ZERO)).to(tl.int32)
    else:
        code += ((values > 0) & (code == 0)).to(tl.int32)
    return code.to(tl.uint8)


@triton.jit
def _adamw(
    weights, gradients, firsts, seconds, first_scales, second_scales, places, factors, scale, found_inf,
    first_table, second_table, first_midpoints, second_midpoints,
    beta1, one_minus_beta1, beta2, one_minus_beta2, eps,
    GROUP: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr, QUANTIZED: tl.constexpr, PERMUTED: tl.constexpr,
    SCALED: tl.constexpr, MAY_SKIP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    weight, gradient, first, second = weights[0], gradients[0], firsts[0], seconds[0]
    first_scale, second_scale = first_scales[0], second_scales[0]
    tensor = 0
    for i in tl.static_range(1, GROUP):
        reached = program >= tl.load(places + i * FIELDS)
        weight, gradient = tl.where(reached, weights[i], weight), tl.where(reached, gradients[i], gradient)
        first, second = tl.where(reached, firsts[i], first), tl.where(reached, seconds[i], second)
        if QUANTIZED:
            first_scale = tl.where(reached, first_scales[i], first_scale)
            second_scale = tl.where(reached, second_scales[i], second_scale)
        tensor = tl.where(reached, i, tensor)
    places += tensor * FIELDS
    count = tl.load(places + 1)
    factors += 3 * tl.load(places + 2)
    step_size, bias_correction, decay_factor = tl.load(factors), tl.load(factors + 1), tl.load(factors + 2)

    row = (program - tl.load(places)) * ROWS + tl.arange(0, ROWS)
    index = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None]
    mask, has_row = index < count, row * BLOCK < count
    at = index  # in the memory of weight and gradient
    if PERMUTED:  # [O, I, ...] in memory as [O, ..., I]
        channels, pixels = tl.load(places + 3), tl.load(places + 4)
        outer, pixel = index // pixels, index % pixels
        at = (outer // channels * pixels + pixel) * channels + outer % channels
    if MAY_SKIP:
        skipped = tl.load(found_inf) != 0
        mask, has_row = mask & (not skipped), has_row & (not skipped)

    w = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        g = tl.div_rn(g, tl.load(scale))
    m = tl.load(first + index, mask=mask, other=0)
    v = tl.load(second + index, mask=mask, other=0)
    if QUANTIZED:
        m_scale = tl.load(first_scale + row, mask=has_row, other=0.0)
        v_scale = tl.load(second_scale + row, mask=has_row, other=0.0)
        m = tl.load(first_table + m.to(tl.int32)) * m_scale[:, None]
        v = tl.load(second_table + v.to(tl.int32)) * v_scale[:, None]
    m = tl.where(mask, m * beta1 + one_minus_beta1 * g, 0.0)
    v = tl.where(mask, v * beta2 + one_minus_beta2 * g * g, 0.0)
    w = decay_factor * w - tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), bias_correction) + eps)
    tl.store(weight + at, w.to(weight.dtype.element_ty), mask=mask)
    if QUANTIZED:
        m_scale, v_scale = tl.max(tl.abs(m), 1), tl.max(v, 1)
        tl.store(first_scale + row, m_scale, mask=has_row)
        tl.store(second_scale + row, v_scale, mask=has_row)
        tl.store(first + index, _quantize(m, m_scale, first_midpoints, True), mask=mask)
        tl.store(second + index, _quantize(v, v_scale, second_midpoints, False), mask=mask)
    else:
        tl.store(first + index, m, mask=mask)
        tl.store(second + index, v, mask=mask)


@dataclass(frozen=True)
class _Item:
    """A tensor of a launch."""

    row: int  # in `factors`
    count: int
    channels: int
    pixels: int
    tensors: tuple[Tensor, ...]  # weight, gradient, moments, scales

    @property
    def programs(self) -> int:
        return triton.cdiv(self.count, ROWS * tables.BLOCK)


def adamw_8bit(
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
    quantized = bool(first_scales)
    lists = [weights, gradients, first, second]
    lists += [first_scales, second_scales] if quantized else [first, second]  # the last two are not used
    kinds: dict[tuple, list[_Item]] = defaultdict(list)
    for row, tensors in enumerate(zip(*lists, strict=True)):
        weight, gradient = tensors[:2]
        assert weight.numel() < 1 << 31, "the kernel counts values in 32 bits"
        channels, pixels = memory_order(weight)
        item = _Item(row, weight.numel(), channels, pixels, tensors)
        kinds[weight.dtype, gradient.dtype, channels > 1].append(item)
    device, betas = weights[0].device, (beta1, complement(beta1), beta2, complement(beta2))
    shared = [f(signed, device) for f in (tables.table, tables.midpoints) for signed in (True, False)]
    for (_, _, permuted), items in kinds.items():
        for group in _launches(items):
            padded = [*group, *[group[-1]] * (-len(group) % GROUP if len(group) > 1 else 0)]
            pointers = [tuple(item.tensors[i] for item in padded) for i in range(6)]
            _adamw[(sum(item.programs for item in group),)](
                *pointers, _places(tuple(group), len(padded), device), factors, scale, found_inf, *shared, *betas, eps,
                len(padded), FIELDS, ROWS, quantized, permuted, scale is not None, found_inf is not None,
            )  # fmt: skip


def memory_order(weight: Tensor) -> tuple[int, int]:
    """Channels and pixels of a tensor [O, I, ...] whose channels are last in memory; 1, 1: its values are in order.

    Other layouts have no kernel (`has_known_layout`).
    """
    if weight.is_contiguous():
        return 1, 1
    return weight.shape[1], weight[0, 0].numel()


def _launches(items: list[_Item]) -> Iterable[list[_Item]]:
    yield from ([item] for item in items if item.count >= LARGE)
    small = [item for item in items if item.count < LARGE]
    yield from (small[i : i + GROUP] for i in range(0, len(small), GROUP))


def _places(group: tuple[_Item, ...], size: int, device: torch.device) -> Tensor:
    """For each tensor of a launch: its first program, number of values, row in `factors`, channels and pixels."""
    described = tuple((item.programs, item.count, item.row, item.channels, item.pixels) for item in group)
    return _places_of(described, size, device)


@functools.cache  # the same in each step: a CUDA graph must not copy it from the host
def _places_of(described: tuple[tuple[int, ...], ...], size: int, device: torch.device) -> Tensor:
    programs = [item[0] for item in described]
    rows = [(begin, *item[1:]) for begin, item in zip(itertools.accumulate(programs, initial=0), described)]
    rows += [(sum(programs), 0, 0, 1, 1)] * (size - len(rows))
    return torch.tensor(rows, dtype=torch.int32, device=device)
