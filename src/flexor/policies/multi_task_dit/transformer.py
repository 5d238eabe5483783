"""DiT, a transformer over an action chunk, conditioned on a vector (Peebles and Xie 2023,
https://arxiv.org/abs/2212.09748).

Observations and noise level form one vector. It does not take part in attention: in every block it shifts,
scales and gates the normalised tokens ("adaLN-Zero"). That costs one linear layer per block, whatever the
observations. Gates start at zero, so each block starts as the identity. The drawback: an action can't attend
to a part of an image.

Parameter names are those of LeRobot's multi-task DiT.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.policies.nn.attention import Attention
from flexor.policies.nn.diffusion import StepEmbedding


class RotaryAttention(nn.Module):
    """Self-attention with rotary position embedding (RoPE, https://arxiv.org/abs/2104.09864)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, heads: int, dropout: float, positions: int, base: float):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv_proj = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)
        size = dim // heads
        frequency = 1.0 / base ** (torch.arange(0, size, 2).float() / size)
        angle = torch.outer(torch.arange(positions).float(), frequency).repeat(1, 2)  # [S, size]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv_proj(x).unflatten(-1, (3, self.heads, -1))  # [B, S, 3, heads, size]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, S, size]
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(self._apply_rope(q), self._apply_rope(k), v, dropout_p=dropout)
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def _apply_rope(self, x: Tensor) -> Tensor:
        """Channels i and i + size/2 are a point in a plane, rotated by the angle of the position."""
        steps = x.shape[-2]
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat((-second, first), -1)
        return x * self.cos[:steps].to(x) + rotated * self.sin[:steps].to(x)


class DiTBlock(nn.Module):
    """Attention and a feed-forward layer, both conditioned on a vector."""

    def __init__(
        self,
        dim: int,
        heads: int,
        condition_dim: int,
        dropout: float,
        positions: int,
        rope_base: float | None,
    ):
        super().__init__()
        if rope_base is not None:
            self.attn = RotaryAttention(dim, heads, dropout, positions, rope_base)
        else:
            self.multihead_attn = Attention(dim, heads, dropout)
        self.rotary = rope_base is not None
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU("tanh"), nn.Linear(4 * dim, dim))
        projection = nn.Linear(condition_dim, 6 * dim)
        nn.init.zeros_(projection.weight)
        nn.init.zeros_(projection.bias)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), projection)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x [B, S, D], condition [B, C] -> [B, S, D]."""
        modulation = self.adaLN_modulation(condition)[:, None].chunk(6, dim=-1)  # each [B, 1, D]
        shift, scale, gate = modulation[:3]
        x = x + gate * self._attend(self.norm1(x) * (1 + scale) + shift)
        shift, scale, gate = modulation[3:]
        return x + gate * self.mlp(self.norm2(x) * (1 + scale) + shift)

    def _attend(self, x: Tensor) -> Tensor:
        return self.attn(x) if self.rotary else self.multihead_attn(x, x, x)


class DiffusionTransformer(nn.Module):
    """A noisy chunk, its noise level and the observations -> the target that the objective defines."""

    def __init__(
        self,
        action_dim: int,
        horizon: int,
        observed_dim: int,
        *,
        dim: int,
        depth: int,
        heads: int,
        time_dim: int,
        dropout: float = 0.0,
        rope_base: float | None = 10_000.0,
        learned_positions: bool = False,
    ):
        super().__init__()
        self.time_mlp = nn.Sequential(
            StepEmbedding(time_dim),
            nn.Linear(time_dim, 2 * time_dim),
            nn.GELU(),
            nn.Linear(2 * time_dim, time_dim),
            nn.GELU(),
        )
        self.input_proj = nn.Linear(action_dim, dim)
        self.pos_embedding = (
            nn.Parameter(torch.empty(1, horizon, dim).normal_(std=0.02)) if learned_positions else None
        )
        self.transformer_blocks = nn.ModuleList(
            DiTBlock(dim, heads, time_dim + observed_dim, dropout, horizon, rope_base) for _ in range(depth)
        )
        self.output_proj = nn.Linear(dim, action_dim)

    def forward(self, chunk: Tensor, time: Tensor, observed: Tensor) -> Tensor:
        """chunk [B, H, A], time [B], observed [B, O] -> [B, H, A]."""
        condition = torch.cat((self.time_mlp(time), observed), -1)
        x = self.input_proj(chunk)  # [B, H, D]
        if self.pos_embedding is not None:
            x = x + self.pos_embedding
        for block in self.transformer_blocks:
            x = block(x, condition)
        return self.output_proj(x)
