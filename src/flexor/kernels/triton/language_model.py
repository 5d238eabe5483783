"""Triton kernels of the operators in `kernels/language_model.py`."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexor.kernels.language_model import norm_programs, norm_rows

ROWS = (64, 32, 16)  # query rows of a program: the more, the fewer times the keys are read
MIN_PROGRAMS, MAX_PROGRAMS = 128, 256  # enough to occupy a GPU, without a second wave
SPLIT_BLOCKS = 4  # blocks of keys per split, if there are more than twice as many


@triton.jit
def _load_rows(pointer, row, width, rows, WIDTH: tl.constexpr):
    """[rows of a tile, WIDTH] in float32, and where its values are."""
    channel = tl.arange(0, WIDTH)
    offset = row.to(tl.int64)[:, None] * width + channel[None, :]
    mask = (row < rows)[:, None] & (channel < width)[None, :]
    return tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32), offset, mask


@triton.jit
def _rms_norm(
    x, weight, out, inverse_rms, rows, width, offset, eps,
    ROUND: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program handles a tile of tokens."""
    row, channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    value, at, mask = _load_rows(x, row, width, rows, WIDTH)
    scale = tl.load(weight + channel, mask=channel < width, other=0.0).to(tl.float32) + offset
    inverse = 1 / tl.sqrt(tl.sum(value * value, 1) / width + eps)
    normed = value * inverse[:, None]
    if ROUND:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (normed * scale[None, :]).to(out.dtype.element_ty), mask=mask)
    tl.store(inverse_rms + row, inverse, mask=row < rows)


def rms_norm(
    x: Tensor, weight: Tensor, offset: float, eps: float, dtype: torch.dtype, round_normed: bool
) -> tuple[Tensor, Tensor]:
    out, width = torch.empty_like(x, dtype=dtype), x.shape[-1]
    inverse_rms = x.new_empty(x.shape[:-1], dtype=torch.float32)
    tile, rows = (norm_rows(width), triton.next_power_of_2(width)), x.numel() // width
    _rms_norm[(triton.cdiv(rows, tile[0]),)](
        x, weight, out, inverse_rms, rows, width, offset, eps, round_normed, *tile, num_warps=_warps(width)
    )
    return out, inverse_rms


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8


@triton.jit
def _rms_norm_backward(
    gradient, x, weight, inverse_rms, dx, parts, rows, width, offset,
    ROUND: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program handles every n-th tile of tokens, and adds up its part of the gradient of the weights."""
    channel = tl.arange(0, WIDTH)
    scale = tl.load(weight + channel, mask=channel < width, other=0.0).to(tl.float32) + offset
    part = tl.zeros([WIDTH], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        value, at, mask = _load_rows(x, row, width, rows, WIDTH)
        grad = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_rms + row, mask=row < rows, other=0.0)[:, None]
        normed, of_normed = value * inverse, grad * scale[None, :]
        if ROUND:
            part += tl.sum(grad * normed.to(x.dtype.element_ty).to(tl.float32), 0)
            of_normed = of_normed.to(x.dtype.element_ty).to(tl.float32)
        else:
            part += tl.sum(grad * normed, 0)
        mean = tl.sum(of_normed * normed, 1) / width
        tl.store(dx + at, ((of_normed - normed * mean[:, None]) * inverse).to(dx.dtype.element_ty), mask=mask)
    tl.store(parts + tl.program_id(0) * width + channel, part, mask=channel < width)


def rms_norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor, offset: float, round_normed: bool
) -> tuple[Tensor, Tensor]:
    dx, width = torch.empty_like(x), x.shape[-1]
    parts = x.new_empty((norm_programs(x), width), dtype=torch.float32)
    tile = norm_rows(width), triton.next_power_of_2(width)
    _rms_norm_backward[(len(parts),)](
        gradient, x, weight, inverse_rms, dx, parts, x.numel() // width, width, offset, round_normed, *tile,
        num_warps=_warps(width),
    )  # fmt: skip
    return dx, parts


@triton.jit
def _rotate(
    x, cos, sin, out, tokens, heads, sample_stride, half,
    BACK: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program handles all heads of one token. `sample_stride` is that of cos and sin. BACK: the other way."""
    token = tl.program_id(0)
    head, channel = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (head < heads) & (channel < 2 * half)
    start = token.to(tl.int64) * heads * 2 * half + head * 2 * half
    angle = (token // tokens).to(tl.int64) * sample_stride + (token % tokens) * 2 * half + channel
    partner_channel = tl.where(channel < half, channel + half, channel - half)
    value = tl.load(x + start + channel, mask=inside, other=0.0).to(tl.float32)
    partner_value = tl.load(x + start + partner_channel, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + angle, mask=channel < 2 * half, other=0.0)
    rotated = value * tl.load(cos + angle, mask=channel < 2 * half, other=0.0)
    rotated += partner_value * (-sine if BACK else sine)
    tl.store(out + start + channel, rotated.to(out.dtype.element_ty), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """x [B, S, heads, D]; cos and sin [B or 1, S, 1, D], float32."""
    batch, tokens, heads, width = x.shape
    out, sample_stride = torch.empty_like(x), 0 if len(cos) == 1 else tokens * width
    sizes = triton.next_power_of_2(heads), triton.next_power_of_2(width)
    _rotate[(batch * tokens,)](x, cos, sin, out, tokens, heads, sample_stride, width // 2, back, *sizes)
    return out


@triton.jit
def _activated(gate, GELU: tl.constexpr):
    """The activation of the gate, and its slope."""
    if GELU:  # by its tanh approximation, which is a sigmoid
        sigmoid = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        inner_slope = 1.5957691216057308 * (1 + 0.134145 * gate * gate)
    else:
        sigmoid = tl.sigmoid(gate)
        inner_slope = 1.0
    return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid) * inner_slope)


@triton.jit
def _gate(gate, up, out, count, GELU: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    active, _ = _activated(tl.load(gate + index, mask=mask, other=0.0).to(tl.float32), GELU)
    active = active.to(out.dtype.element_ty).to(tl.float32)  # torch rounds here
    value = active * tl.load(up + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + index, value.to(out.dtype.element_ty), mask=mask)


def gate(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    out = torch.empty_like(gate)
    _gate[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), gelu, 1024)
    return out


@triton.jit
def _gate_backward(gradient, gate, up, dgate, dup, count, GELU: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    grad = tl.load(gradient + index, mask=mask, other=0.0).to(tl.float32)
    active, slope = _activated(tl.load(gate + index, mask=mask, other=0.0).to(tl.float32), GELU)
    # torch rounds the activation, and the gradient of it
    active = active.to(gate.dtype.element_ty).to(tl.float32)
    tl.store(dup + index, (grad * active).to(dup.dtype.element_ty), mask=mask)
    of_active = grad * tl.load(up + index, mask=mask, other=0.0).to(tl.float32)
    of_active = of_active.to(gate.dtype.element_ty).to(tl.float32)
    tl.store(dgate + index, (of_active * slope).to(dgate.dtype.element_ty), mask=mask)


def gate_backward(gradient: Tensor, gate: Tensor, up: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    count = gate.numel()
    _gate_backward[(triton.cdiv(count, 1024),)](gradient, gate, up, dgate, dup, count, gelu, 1024)
    return dgate, dup


@triton.jit
def _attend_few(
    queries, keys, values, mask, out, split_stats, tokens, count, split_keys, group, scale,
    q_sample, q_token, k_sample, k_token, k_head, v_sample, v_token, v_head, m_sample, m_token,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program handles some rows of one sample and key head, and one split of the keys: `split_keys` of them.

    A row is a token of one of the `group` query heads that share the key head. With several splits, `out` receives
    unnormalised outputs, and `split_stats` the maximum score and the softmax denominator of each.
    """
    sample, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    split = tl.program_id(0) % SPLITS
    row = tl.program_id(0) // SPLITS * ROWS + tl.arange(0, ROWS)
    row_mask = row < tokens * group
    token, channel = row // group, tl.arange(0, WIDTH)
    row_offset = sample * q_sample + token * q_token + (head * group + row % group) * WIDTH
    query = tl.load(queries + row_offset[:, None] + channel[None, :], mask=row_mask[:, None], other=0.0)
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(split * split_keys, min(split * split_keys + split_keys, count), KEYS):
        key_index = start + tl.arange(0, KEYS)
        key_mask = key_index < count
        offset = sample * k_sample + head * k_head + key_index[:, None] * k_token + channel[None, :]
        key = tl.load(keys + offset, mask=key_mask[:, None], other=0.0)
        offset = sample * m_sample + token[:, None] * m_token + key_index[None, :]
        visible = tl.load(mask + offset, mask=row_mask[:, None] & key_mask[None, :], other=0)
        score = tl.where(visible != 0, tl.dot(query, tl.trans(key)) * scale, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(score, 1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)  # no visible key so far
        rescale, weight = tl.exp(running_max - base), tl.exp(score - base[:, None])
        offset = sample * v_sample + head * v_head + key_index[:, None] * v_token + channel[None, :]
        value = tl.load(values + offset, mask=key_mask[:, None], other=0.0)
        output = output * rescale[:, None] + tl.dot(weight.to(value.dtype), value)
        denominator = denominator * rescale + tl.sum(weight, 1)
        running_max = new_max
    if SPLITS == 1:
        output = output / tl.where(denominator > 0, denominator, 1.0)[:, None]
    else:
        row_offset = row_offset * SPLITS + split * WIDTH
        tl.store(split_stats + row_offset // WIDTH * 2, running_max, mask=row_mask)
        tl.store(split_stats + row_offset // WIDTH * 2 + 1, denominator, mask=row_mask)
    tl.store(
        out + row_offset[:, None] + channel[None, :], output.to(out.dtype.element_ty), mask=row_mask[:, None]
    )


@triton.jit
def _merge_splits(outputs, split_stats, out, splits, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    """A program merges the splits of one row."""
    row = tl.program_id(0).to(tl.int64)
    split, channel = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    split_mask = split < splits
    split_max = tl.load(split_stats + (row * splits + split) * 2, mask=split_mask, other=float("-inf"))
    denominator = tl.load(split_stats + (row * splits + split) * 2 + 1, mask=split_mask, other=0.0)
    new_max = tl.max(split_max, 0)
    weight = tl.exp(split_max - tl.where(new_max == float("-inf"), 0.0, new_max))
    offset = (row * splits + split)[:, None] * WIDTH + channel[None, :]
    output = tl.sum(tl.load(outputs + offset, mask=split_mask[:, None], other=0.0) * weight[:, None], 0)
    denominator = tl.sum(denominator * weight, 0)
    output = output / tl.where(denominator > 0, denominator, 1.0)
    tl.store(out + row * WIDTH + channel, output.to(out.dtype.element_ty))


def attend_few(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """queries [B, Q, heads, D], contiguous; keys and values [B, K, kv_heads, D]; mask [B, 1, Q or 1, K]."""
    batch, tokens, heads, width = queries.shape
    count, kv_heads = keys.shape[1:3]
    keys, values = (t if t.stride(-1) == 1 else t.contiguous() for t in (keys, values))
    visible = mask.expand(batch, 1, -1, -1)[:, 0]
    visible = (visible if visible.stride(-1) == 1 else visible.contiguous()).view(torch.uint8)
    out, group, block = torch.empty_like(queries), heads // kv_heads, 32 if width > 128 else 64
    blocks = triton.cdiv(count, block)
    splits = 1 if blocks <= 2 * SPLIT_BLOCKS else triton.cdiv(blocks, SPLIT_BLOCKS)
    programs = splits * kv_heads * batch
    enough = (rows for rows in ROWS if triton.cdiv(tokens * group, rows) * programs >= MIN_PROGRAMS)
    block_rows = next(enough, ROWS[-1])
    row_blocks = triton.cdiv(tokens * group, block_rows)
    splits = min(splits, max(1, MAX_PROGRAMS // (row_blocks * kv_heads * batch)))
    split_keys = triton.cdiv(blocks, splits) * block
    outputs, split_stats = out, out
    if splits > 1:
        outputs = queries.new_empty((*queries.shape[:3], splits, width), dtype=torch.float32)
        split_stats = queries.new_empty((*queries.shape[:3], splits, 2), dtype=torch.float32)
    grid = row_blocks * splits, kv_heads, batch
    _attend_few[grid](
        queries, keys, values, visible, outputs, split_stats, tokens, count, split_keys, group, width**-0.5,
        queries.stride(0), queries.stride(1), *keys.stride()[:3], *values.stride()[:3],
        visible.stride(0), visible.stride(1) if visible.shape[1] > 1 else 0,
        splits, block_rows, block, width, num_warps=4, num_stages=1 if block_rows > 32 else 2,
    )  # fmt: skip
    if splits > 1:
        size = triton.next_power_of_2(splits)
        _merge_splits[(batch * tokens * heads,)](outputs, split_stats, out, splits, size, width, num_warps=2)
    return out
