"""The Triton kernels of the operators in `kernels/language_model.py`."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = (64, 32, 16)  # of queries, in a program; more of them read the keys less often
PROGRAMS, MOST = 128, 256  # which keep a GPU busy; with more, some would wait for others to end
BLOCKS = 4  # of keys that a program goes through, if there are more than twice as many


@triton.jit
def _rms_norm(x, weight, out, width, plus, eps, WIDTH: tl.constexpr):
    """A program has one token."""
    start = tl.program_id(0).to(tl.int64) * width
    channel = tl.arange(0, WIDTH)
    inside = channel < width
    value = tl.load(x + start + channel, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32) + plus
    root = 1 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(out + start + channel, (value * root * scale).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, plus: float, eps: float, dtype: torch.dtype) -> Tensor:
    out, width = torch.empty_like(x, dtype=dtype), x.shape[-1]
    size = triton.next_power_of_2(width)
    _rms_norm[(x.numel() // width,)](
        x, weight, out, width, plus, eps, size, num_warps=4 if size <= 2048 else 8
    )
    return out


@triton.jit
def _rotate(x, cos, sin, out, tokens, heads, apart, half, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """A program has all heads of one token. `apart`: from one sample to the next in cos and sin."""
    token = tl.program_id(0)
    head, channel = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (head < heads) & (channel < 2 * half)
    start = token.to(tl.int64) * heads * 2 * half + head * 2 * half
    turn = (token // tokens).to(tl.int64) * apart + (token % tokens) * 2 * half + channel
    other = tl.where(channel < half, channel + half, channel - half)
    value = tl.load(x + start + channel, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(x + start + other, mask=inside, other=0.0).to(tl.float32)
    turned = value * tl.load(cos + turn, mask=inside, other=0.0)
    turned += partner * tl.load(sin + turn, mask=inside, other=0.0)
    tl.store(out + start + channel, turned.to(out.dtype.element_ty), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, S, heads, D]; cos and sin [B or 1, S, 1, D], float32."""
    batch, tokens, heads, width = x.shape
    out, apart = torch.empty_like(x), 0 if len(cos) == 1 else tokens * width
    sizes = triton.next_power_of_2(heads), triton.next_power_of_2(width)
    _rotate[(batch * tokens,)](x, cos, sin, out, tokens, heads, apart, width // 2, *sizes)
    return out


@triton.jit
def _gate(gate, up, out, count, GELU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    if GELU:  # noqa: SIM108, a branch of the compiler's
        active = g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
    else:
        active = g * tl.sigmoid(g)
    active = active.to(out.dtype.element_ty).to(tl.float32)  # torch rounds here
    value = active * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def gate(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    out = torch.empty_like(gate)
    _gate[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), gelu, 1024)
    return out


@triton.jit
def _attend_few(
    queries, keys, values, mask, out, parts, tokens, count, each, shared, scale,
    q_sample, q_token, k_sample, k_token, k_head, v_sample, v_token, v_head, m_sample, m_token,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program has some rows of one sample and one head of keys, and `each` of the keys, or all of them.

    A row is a token of one of the query heads. With several splits, `out` gets sums of values, and `parts` the highest
    score and the sum of weights that belong to them.
    """
    sample, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    split = tl.program_id(0) % SPLITS
    row = tl.program_id(0) // SPLITS * ROWS + tl.arange(0, ROWS)
    inside = row < tokens * shared
    token, channel = row // shared, tl.arange(0, WIDTH)
    place = sample * q_sample + token * q_token + (head * shared + row % shared) * WIDTH
    query = tl.load(queries + place[:, None] + channel[None, :], mask=inside[:, None], other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(split * each, min(split * each + each, count), KEYS):
        number = start + tl.arange(0, KEYS)
        there = number < count
        at = sample * k_sample + head * k_head + number[:, None] * k_token + channel[None, :]
        key = tl.load(keys + at, mask=there[:, None], other=0.0)
        at = sample * m_sample + token[:, None] * m_token + number[None, :]
        seen = tl.load(mask + at, mask=inside[:, None] & there[None, :], other=0)
        score = tl.where(seen != 0, tl.dot(query, tl.trans(key)) * scale, float("-inf"))
        highest = tl.maximum(best, tl.max(score, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen so far
        keep, weight = tl.exp(best - base), tl.exp(score - base[:, None])
        at = sample * v_sample + head * v_head + number[:, None] * v_token + channel[None, :]
        value = tl.load(values + at, mask=there[:, None], other=0.0)
        found = found * keep[:, None] + tl.dot(weight.to(value.dtype), value)
        total = total * keep + tl.sum(weight, 1)
        best = highest
    if SPLITS == 1:
        found = found / tl.where(total > 0, total, 1.0)[:, None]
    else:
        place = place * SPLITS + split * WIDTH
        tl.store(parts + place // WIDTH * 2, best, mask=inside)
        tl.store(parts + place // WIDTH * 2 + 1, total, mask=inside)
    tl.store(out + place[:, None] + channel[None, :], found.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _join(sums, parts, out, splits, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    """A program has one row, whose splits are joined."""
    row = tl.program_id(0).to(tl.int64)
    split, channel = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    there = split < splits
    best = tl.load(parts + (row * splits + split) * 2, mask=there, other=float("-inf"))
    total = tl.load(parts + (row * splits + split) * 2 + 1, mask=there, other=0.0)
    highest = tl.max(best, 0)
    weight = tl.exp(best - tl.where(highest == float("-inf"), 0.0, highest))
    at = (row * splits + split)[:, None] * WIDTH + channel[None, :]
    found = tl.sum(tl.load(sums + at, mask=there[:, None], other=0.0) * weight[:, None], 0)
    total = tl.sum(total * weight, 0)
    found = found / tl.where(total > 0, total, 1.0)
    tl.store(out + row * WIDTH + channel, found.to(out.dtype.element_ty))


def attend_few(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """queries [B, Q, heads, D], contiguous; keys and values [B, K, kv_heads, D]; mask [B, 1, Q or 1, K]."""
    batch, tokens, heads, width = queries.shape
    count, kv_heads = keys.shape[1:3]
    keys, values = (each if each.stride(-1) == 1 else each.contiguous() for each in (keys, values))
    seen = mask.expand(batch, 1, -1, -1)[:, 0]
    seen = (seen if seen.stride(-1) == 1 else seen.contiguous()).view(torch.uint8)
    out, shared, block = torch.empty_like(queries), heads // kv_heads, 32 if width > 128 else 64
    blocks = triton.cdiv(count, block)
    splits = 1 if blocks <= 2 * BLOCKS else triton.cdiv(blocks, BLOCKS)
    programs = splits * kv_heads * batch
    rows = next((r for r in ROWS if triton.cdiv(tokens * shared, r) * programs >= PROGRAMS), ROWS[-1])
    parts_of_rows = triton.cdiv(tokens * shared, rows)
    splits = min(splits, max(1, MOST // (parts_of_rows * kv_heads * batch)))
    each = triton.cdiv(blocks, splits) * block
    found, parts = out, out
    if splits > 1:
        found = queries.new_empty((*queries.shape[:3], splits, width), dtype=torch.float32)
        parts = queries.new_empty((*queries.shape[:3], splits, 2), dtype=torch.float32)
    grid = parts_of_rows * splits, kv_heads, batch
    _attend_few[grid](
        queries, keys, values, seen, found, parts, tokens, count, each, shared, width**-0.5,
        queries.stride(0), queries.stride(1), *keys.stride()[:3], *values.stride()[:3],
        seen.stride(0), seen.stride(1) if seen.shape[1] > 1 else 0,
        splits, rows, block, width, num_warps=4, num_stages=1 if rows > 32 else 2,
    )  # fmt: skip
    if splits > 1:
        size = triton.next_power_of_2(splits)
        _join[(batch * tokens * heads,)](found, parts, out, splits, size, width, num_warps=2)
    return out
