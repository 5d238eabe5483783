"""BART's encoder (Lewis et al. 2019, https://arxiv.org/abs/1910.13461): all tokens attend to each other.

Every layer normalises after it adds. Parameter names are those of `transformers`, below `encoder.`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from flexor.policies.nn.attention import EncoderAttention

POSITION_OFFSET = 2  # the first rows of the position embedding are not used


@dataclass(frozen=True)
class BartSize:
    """The size of an encoder; the defaults are those of BART large."""

    width: int = 1024
    depth: int = 12
    heads: int = 16
    mlp_width: int = 4096
    vocabulary: int = 50_265
    positions: int = 1024
    """The longest sequence."""
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    embed_scale: float = 1.0


class BartLayer(nn.Module):
    def __init__(self, size: BartSize):
        super().__init__()
        self.size = size
        self.self_attn = EncoderAttention(size.width, size.heads, size.attention_dropout)
        self.self_attn_layer_norm = nn.LayerNorm(size.width)
        self.fc1 = nn.Linear(size.width, size.mlp_width)
        self.fc2 = nn.Linear(size.mlp_width, size.width)
        self.final_layer_norm = nn.LayerNorm(size.width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, width]."""
        x = self.self_attn_layer_norm(x + self._dropped(self.self_attn(x), self.size.dropout))
        hidden = self._dropped(F.gelu(self.fc1(x)), self.size.activation_dropout)
        return self.final_layer_norm(x + self._dropped(self.fc2(hidden), self.size.dropout))

    def _dropped(self, x: Tensor, rate: float) -> Tensor:
        return F.dropout(x, rate, self.training) if rate else x


class BartEncoder(nn.Module):
    """Embedded tokens [B, S, width] -> [B, S, width]."""

    def __init__(self, size: BartSize, embed_tokens: nn.Embedding):
        super().__init__()
        self.dropout = size.dropout
        self.embed_tokens = embed_tokens
        self.embed_positions = nn.Embedding(size.positions + POSITION_OFFSET, size.width)
        self.layers = nn.ModuleList(BartLayer(size) for _ in range(size.depth))
        self.layernorm_embedding = nn.LayerNorm(size.width)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.embed_positions.weight[POSITION_OFFSET:][: x.shape[1]]
        x = self.layernorm_embedding(x + positions)
        x = F.dropout(x, self.dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        return x
