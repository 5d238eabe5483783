"""A causal transformer over input vectors, with nanoGPT's parameter names (as LeRobot's VQ-BeT has them).

Tokens are projections of observations, not words, so there is no vocabulary: vectors in, vectors out.
Attention is torch's fused attention. The attention mask of every layer is a buffer only because checkpoints
contain it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GPT(nn.Module):
    """Tokens [B, S, inputs] -> features [B, S, outputs], each of which depends on no later token."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        dim: int,
        heads: int,
        layers: int,
        block_size: int,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.block_size = block_size
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Linear(inputs, dim),
                "wpe": nn.Embedding(block_size, dim),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(Block(dim, heads, block_size, dropout) for _ in range(layers)),
                "ln_f": nn.LayerNorm(dim),
            }
        )
        self.lm_head = nn.Linear(dim, outputs, bias=False)
        self._init_weights(layers)

    def _init_weights(self, layers: int) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:  # scaled down, since every layer adds to the residual stream
            assert isinstance(block, Block)
            nn.init.normal_(block.attn.c_proj.weight, std=0.02 / math.sqrt(2 * layers))

    @property
    def blocks(self) -> list[nn.Module]:
        layers = self.transformer["h"]
        assert isinstance(layers, nn.ModuleList)
        return list(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        assert length <= self.block_size, f"{length} tokens, but positions for {self.block_size}"
        positions = torch.arange(length, device=tokens.device)
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](positions)
        x = self.transformer["drop"](x)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))

    def decay_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Matrices, which get weight decay, and all other parameters; both sorted by name."""
        matrices = {f"{name}.weight" for name, m in self.named_modules() if isinstance(m, nn.Linear)}
        named = sorted(self.named_parameters())
        return [p for n, p in named if n in matrices], [p for n, p in named if n not in matrices]


class Block(nn.Module):
    """Attention, then a feed-forward layer, each with pre-normalisation and a residual connection."""

    def __init__(self, dim: int, heads: int, block_size: int, dropout: float):
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim)
        self.attn = CausalSelfAttention(dim, heads, block_size, dropout)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:  # [B, S, D]
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class CausalSelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int, block_size: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.c_attn = nn.Linear(dim, 3 * dim)
        self.c_proj = nn.Linear(dim, dim)
        causal_mask = torch.ones(block_size, block_size).tril()
        self.register_buffer("bias", causal_mask[None, None])  # not used: LeRobot's checkpoints have it

    def forward(self, x: Tensor) -> Tensor:  # [B, S, D]
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, heads, S, D/heads]
            for part in self.c_attn(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return F.dropout(self.c_proj(out.transpose(1, 2).flatten(2)), self.dropout, self.training)
