"""Transformer parts with the parameter names of torch's own layers, on fused attention."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.policies.nn.autocast import autocast_type


class Attention(nn.Module):
    """Multi-head attention, batch first, with `nn.MultiheadAttention`'s parameters.

    torch's module is not used: by default it materialises the attention weights, and its mask has a shape
    that the fused kernels do not support.
    """

    def __init__(self, dim: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """query [B, Q, D], key and value [B, K, D], key_mask [B, K] (False hides a key) -> [B, Q, D]."""
        projected = self._project(query, key, value)  # each becomes [B, heads, S, D / heads]
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in projected)
        mask = None if key_mask is None else key_mask[:, None, None, :]
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """The three projections; inputs that are the same tensor are projected together."""
        dtype = autocast_type(query)  # cast at once: autocast would cast each part
        weight, bias = self.in_proj_weight.to(dtype), self.in_proj_bias.to(dtype)
        if query is key is value:
            return F.linear(query, weight, bias).chunk(3, -1)
        weights, biases = weight.chunk(3), bias.chunk(3)
        v = F.linear(value, weights[2], biases[2])
        if query is key:
            width = 2 * query.shape[-1]
            return (*F.linear(query, weight[:width], bias[:width]).chunk(2, -1), v)
        return F.linear(query, weights[0], biases[0]), F.linear(key, weights[1], biases[1]), v


class EncoderAttention(nn.Module):
    """Every token attends to every other. Parameter names are those of `transformers` for SigLIP and BART."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        # in the order of LeRobot's: its optimizer numbers them
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )  # each [B, heads, S, width / heads]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


def sinusoidal_positions(count: int, dim: int) -> Tensor:
    """[count, dim]: sine on even, cosine on odd channels, wavelengths from 2 pi to 10000 x 2 pi."""
    channel = torch.arange(dim, dtype=torch.float64)
    wavelength = 10_000 ** (2 * (channel // 2) / dim)
    angle = torch.arange(count, dtype=torch.float64)[:, None] / wavelength
    return torch.where(channel.long() % 2 == 0, angle.sin(), angle.cos()).float()


def sinusoidal_positions_2d(height: int, width: int, dim: int) -> Tensor:
    """[height * width, dim]: the vertical position in the first half of the channels, then the horizontal.

    As in DETR, positions count from 1 and are scaled so that the last one is (almost) 2 pi.
    """
    half = dim // 2
    channel = torch.arange(half, dtype=torch.float32)
    wavelength = 10_000 ** (2 * (channel // 2) / half)

    def encode(size: int) -> Tensor:  # [size, half]
        position = torch.arange(1, size + 1, dtype=torch.float32)
        angle = (position / (size + 1e-6) * 2 * math.pi)[:, None] / wavelength
        return torch.where(channel.long() % 2 == 0, angle.sin(), angle.cos())

    rows = encode(height)[:, None].expand(height, width, half)
    columns = encode(width)[None, :].expand(height, width, half)
    return torch.cat((rows, columns), dim=-1).reshape(height * width, 2 * half)
