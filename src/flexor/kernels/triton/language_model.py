"""Triton kernels of the operators in `kernels/language_model.py`."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = (64, 32, 16)  # query rows of a program: the more, the fewer times the keys are read
MIN_PROGRAMS, MAX_PROGRAMS = 128, 256  # enough to occupy a GPU, without a second wave
SPLIT_BLOCKS = 4  # blocks of keys per split, if there are more than twice as many


@triton.jit
def _rms_norm(x, weight, out, width, offset, eps, ROUND: tl.constexpr, WIDTH: tl.constexpr):
    """A program handles one token."""
    start = tl.program_id(0).to(tl.int64) * width
    channel = tl.arange(0, WIDTH)
    inside = channel < width
    value = tl.load(x + start + channel, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32) + offset
    rstd = 1 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    normed = value * rstd
    if ROUND:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + start + channel, (normed * scale).to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor, offset: float, eps: float, dtype: torch.dtype, round_normed: bool
) -> Tensor:
    out, width = torch.empty_like(x, dtype=dtype), x.shape[-1]
    size = triton.next_power_of_2(width)
    _rms_norm[(x.numel() // width,)](
        x, weight, out, width, offset, eps, round_normed, size, num_warps=4 if size <= 2048 else 8
    )
    return out


@triton.jit
def _rotate(x, cos, sin, out, tokens, heads, sample_stride, half, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """A program handles all heads of one token. `sample_stride` is that of cos and sin."""
    token = tl.program_id(0)
    head, channel = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (head < heads) & (channel < 2 * half)
    start = token.to(tl.int64) * heads * 2 * half + head * 2 * half
    angle = (token // tokens).to(tl.int64) * sample_stride + (token % tokens) * 2 * half + channel
    partner_channel = tl.where(channel < half, channel + half, channel - half)
    value = tl.load(x + start + channel, mask=inside, other=0.0).to(tl.float32)
    partner_value = tl.load(x + start + partner_channel, mask=inside, other=0.0).to(tl.float32)
    rotated = value * tl.load(cos + angle, mask=inside, other=0.0)
    rotated += partner_value * tl.load(sin + angle, mask=inside, other=0.0)
    tl.store(out + start + channel, rotated.to(out.dtype.element_ty), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, S, heads, D]; cos and sin [B or 1, S, 1, D], float32."""
    batch, tokens, heads, width = x.shape
    out, sample_stride = torch.empty_like(x), 0 if len(cos) == 1 else tokens * width
    sizes = triton.next_power_of_2(heads), triton.next_power_of_2(width)
    _rotate[(batch * tokens,)](x, cos, sin, out, tokens, heads, sample_stride, width // 2, *sizes)
    return out


@triton.jit
def _gate(gate, up, out, count, GELU: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    g = tl.load(gate + index, mask=mask, other=0.0).to(tl.float32)
    if GELU:  # noqa: SIM108, a branch of the compiler's
        active = g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
    else:
        active = g * tl.sigmoid(g)
    active = active.to(out.dtype.element_ty).to(tl.float32)  # torch rounds here
    value = active * tl.load(up + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + index, value.to(out.dtype.element_ty), mask=mask)


def gate(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    out = torch.empty_like(gate)
    _gate[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), gelu, 1024)
    return out


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
