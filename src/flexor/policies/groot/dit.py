"""The transformer of GR00T that denoises actions (a DiT, Peebles and Xie 2023, https://arxiv.org/abs/2212.09748).

Its blocks attend in turn to words, to themselves, to images, to themselves, and so on. The time of denoising scales and
shifts the input of every block. What blocks attend to in words and images does not depend on the actions: when the
policy acts, those keys and values are computed once. Parameter names are those of `diffusers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from flexor.policies.groot.embodiment import sines
from flexor.policies.nn.autocast import autocast_type

TIME_CHANNELS = 256


@dataclass(frozen=True)
class BlockSize:
    """The size of a stack of blocks."""

    depth: int
    heads: int
    head_dim: int
    dropout: float = 0.2
    final_dropout: bool = True
    """Dropout also of what a block adds to its input."""
    attention_bias: bool = True

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> BlockSize:
        """From `diffusion_model_cfg` or `vl_self_attention_cfg` of GR00T's config.json."""
        if config.get("positional_embeddings", "sinusoidal") is not None:
            raise ValueError("positional_embeddings must be null")
        for name, only in (("activation_fn", "gelu-approximate"), ("upcast_attention", False)):
            if config.get(name, only) != only:
                raise ValueError(f"{name} must be {only}")
        return cls(
            config["num_layers"],
            config["num_attention_heads"],
            config["attention_head_dim"],
            float(config.get("dropout", 0.1)),
            bool(config.get("final_dropout", True)),
            bool(config.get("attention_bias", True)),
        )


class TokenMemory(NamedTuple):
    """Tokens that a block attends to."""

    tokens: Tensor  # [B, S, D]
    mask: Tensor | None  # [B, 1, 1, S], False for padding


class KeysAndValues(NamedTuple):
    """What a block makes of a memory."""

    keys: Tensor  # [B, heads, S, head_dim]
    values: Tensor
    mask: Tensor | None


class BlockAttention(nn.Module):
    def __init__(self, size: BlockSize, memory_width: int | None = None):
        super().__init__()
        width, bias = size.width, size.attention_bias
        self.heads = size.heads
        self.to_q = nn.Linear(width, width, bias=bias)
        self.to_k = nn.Linear(memory_width or width, width, bias=bias)
        self.to_v = nn.Linear(memory_width or width, width, bias=bias)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def keys_values(self, memory: TokenMemory) -> KeysAndValues:
        return KeysAndValues(
            self._split(self.to_k(memory.tokens)), self._split(self.to_v(memory.tokens)), memory.mask
        )

    def forward(self, x: Tensor, memory: KeysAndValues) -> Tensor:
        q = self._split(self.to_q(x))
        out = F.scaled_dot_product_attention(q, memory.keys, memory.values, attn_mask=memory.mask)
        return self.to_out[0](out.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class AdaptiveNorm(nn.Module):
    """A norm that a condition scales and shifts."""

    def __init__(self, width: int):
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x [B, S, width], condition [B, width]."""
        scale, shift = self.linear(F.silu(condition))[:, None].chunk(2, dim=-1)
        return F.layer_norm(x, (self.width,), eps=1e-5) * (1 + scale) + shift


class Projection(nn.Module):
    """The first layer of a `FeedForward`, under the name that `diffusers` gives it."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.proj = nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    def __init__(self, size: BlockSize):
        super().__init__()
        width = size.width
        last = [nn.Dropout(size.dropout)] if size.final_dropout else []
        layers = (
            Projection(width, 4 * width),
            nn.Dropout(size.dropout),
            nn.Linear(4 * width, width),
            *last,
        )
        self.net = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = layer(x)
        return x


class ConditionedBlock(nn.Module):
    def __init__(self, size: BlockSize, adaptive: bool, memory_width: int | None = None):
        """`adaptive`: a condition changes the block's input. `memory_width`: width of the tokens that it attends to,
        instead of its own."""
        super().__init__()
        width = size.width
        self.norm1: nn.Module = AdaptiveNorm(width) if adaptive else nn.LayerNorm(width)
        self.attn1 = BlockAttention(size, memory_width)
        self.norm3 = nn.LayerNorm(width, elementwise_affine=not adaptive)
        self.ff = FeedForward(size)
        self.dropout = size.dropout
        self.final_dropout = size.final_dropout

    def forward(
        self,
        x: Tensor,
        condition: Tensor | None = None,
        memory: TokenMemory | KeysAndValues | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """x [B, S, width] -> the same shape. It attends to `memory`; None: to itself, where `mask` is true."""
        dtype = autocast_type(x)  # of the norms' outputs: cast once, for all layers that get them
        normed = (self.norm1(x) if condition is None else self.norm1(x, condition)).to(dtype)
        memory = TokenMemory(normed, mask) if memory is None else memory
        attended = self.attn1(normed, memory if isinstance(memory, KeysAndValues) else self.remember(memory))
        attended = F.dropout(attended, self.dropout, self.training)
        if self.final_dropout:
            attended = F.dropout(attended, self.dropout, self.training)
        x = attended + x
        return self.ff(self.norm3(x).to(dtype)) + x

    def remember(self, memory: TokenMemory) -> KeysAndValues:
        return self.attn1.keys_values(memory)


class SelfAttentionStack(nn.Module):
    """Blocks that attend to themselves."""

    def __init__(self, size: BlockSize):
        super().__init__()
        self.transformer_blocks = nn.ModuleList(
            ConditionedBlock(size, adaptive=False) for _ in range(size.depth)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x [B, S, width], mask [B, 1, 1, S]."""
        for block in self.transformer_blocks:
            x = block(x, mask=mask)
        return x


class TimeEmbedder(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.linear_1 = nn.Linear(TIME_CHANNELS, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, time: Tensor) -> Tensor:
        channels = sines(time, TIME_CHANNELS, shift=1, cosines_first=True)
        return self.linear_2(F.silu(self.linear_1(channels.to(self.linear_1.weight.dtype))))


class TimeEncoder(nn.Module):
    """Exists for the names of its weights."""

    def __init__(self, width: int):
        super().__init__()
        self.timestep_embedder = TimeEmbedder(width)

    def forward(self, time: Tensor) -> Tensor:
        return self.timestep_embedder(time)


@dataclass(frozen=True)
class DiTSize:
    blocks: BlockSize
    output: int
    memory: int
    """Width of the tokens of images and words."""
    interleave: bool = True
    """Every other block attends to actions and state instead."""
    alternate: bool = True
    """Blocks attend in turn to words and to images, instead of to both."""
    words_every: int = 2
    """Of the blocks that attend to images or words, those that attend to words."""

    def reads(self, number: int) -> int | None:
        """Which of words, images and all tokens block `number` attends to, as 0, 1 and 2; None: itself."""
        if self.interleave and number % 2:
            return None
        if not self.alternate:
            return 2
        return 0 if number % (2 * self.words_every) == 0 else 1


class DiT(nn.Module):
    def __init__(self, size: DiTSize):
        super().__init__()
        self.size = size
        width = size.blocks.width
        self.timestep_encoder = TimeEncoder(width)
        self.transformer_blocks = nn.ModuleList(
            ConditionedBlock(size.blocks, True, None if size.reads(number) is None else size.memory)
            for number in range(size.blocks.depth)
        )
        self.proj_out_1 = nn.Linear(width, 2 * width)
        self.proj_out_2 = nn.Linear(width, size.output)

    def remember(self, memories: Sequence[TokenMemory]) -> list[KeysAndValues | None]:
        """What each block makes of the memories, for several calls of `forward`. A batch of words and images."""
        remembered: list[KeysAndValues | None] = []
        for number, block in enumerate(self.transformer_blocks):
            assert isinstance(block, ConditionedBlock)
            read = self.size.reads(number)
            remembered.append(None if read is None else block.remember(memories[read]))
        return remembered

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        memories: Sequence[TokenMemory],
        remembered: Sequence[KeysAndValues | None] | None = None,
    ) -> Tensor:
        """x [B, S, width] at times [B] -> [B, S, output]. `memories`: words, images, and all tokens."""
        condition = self.timestep_encoder(time)
        for number, block in enumerate(self.transformer_blocks):
            read = self.size.reads(number)
            memory: TokenMemory | KeysAndValues | None = None if read is None else memories[read]
            x = block(x, condition, memory if remembered is None else remembered[number])
        shift, scale = self.proj_out_1(F.silu(condition))[:, None].chunk(2, dim=-1)
        normed = F.layer_norm(x, (self.size.blocks.width,), eps=1e-6)
        return self.proj_out_2(normed * (1 + scale) + shift)
