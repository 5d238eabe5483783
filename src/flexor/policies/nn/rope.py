"""Rotary position embedding (RoPE, Su et al. 2021, https://arxiv.org/abs/2104.09864), also of images (M-RoPE)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexor.kernels.language_model import rotate


class Rope(NamedTuple):
    """Cosines and sines of tokens' positions, in float32: computed once for all layers."""

    cos: Tensor  # [B, S, 1, head_dim]
    sin: Tensor  # negative for the first half of the channels

    def slice(self, tokens: slice) -> Rope:
        """Those of some of the tokens."""
        return Rope(self.cos[:, tokens], self.sin[:, tokens])


def make_rope(
    positions: Tensor,
    head_dim: int,
    theta: float = 10_000.0,
    sections: Sequence[int] | None = None,
    interleaved: bool = False,
) -> Rope:
    """The embedding of positions [B, S]; with `sections` of [3, B, S], which are time, row and column.

    Of the head_dim / 2 frequencies, sections (2, 3, 3) take

        chunked        t t h h h w w w
        interleaved    t h w t h w h w    a triple for each time; the rest are of the longer sections
    """
    channel = torch.arange(0, head_dim, 2, device=positions.device).float()
    axes = positions[..., None, None] if sections is None else _by_channel(positions, sections, interleaved)
    angle = axes.float() / theta ** (channel / head_dim)  # [B, S, 1, head_dim / 2]
    sin = angle.sin()
    return Rope(angle.cos().repeat(1, 1, 1, 2), torch.cat((-sin, sin), dim=-1))


def _by_channel(positions: Tensor, sections: Sequence[int], interleaved: bool) -> Tensor:
    """Positions [3, B, S] -> [B, S, 1, head_dim / 2], each on the axis of its channel."""
    time, row, column = positions[..., None, None]
    if not interleaved:
        axes = zip((time, row, column), sections, strict=True)
        return torch.cat([axis.expand(-1, -1, -1, channels) for axis, channels in axes], dim=-1)
    channel = torch.arange(sum(sections), device=positions.device)
    is_row = (channel % 3 == 1) & (channel < 3 * sections[1])
    is_column = (channel % 3 == 2) & (channel < 3 * sections[2])
    return torch.where(is_row, row, torch.where(is_column, column, time))


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate x [B, S, heads, head_dim]: channels i and i + head_dim / 2 are a point in a plane."""
    return rotate(x, rope.cos, rope.sin)
