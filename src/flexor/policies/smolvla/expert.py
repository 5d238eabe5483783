"""The action expert: a narrower Llama over a noisy chunk, beside the language model.

Each of its layers attends to the keys and values of one layer of the language model, the prefix. Self-attention layers
also attend to the chunk, and count positions from the prefix's end. Cross-attention layers project the prefix's keys
and values again, and count positions from the first action. Rows attend to columns, x is padding:

    self-attention     prefix    chunk        cross-attention    prefix
    chunk           |  1 1 x  |  1 0 0        chunk           |  1 1 x
                    |  1 1 x  |  1 1 0                        |  1 1 x
                    |  1 1 x  |  1 1 1                        |  1 1 x
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flexor.core.errors import ConfigError
from flexor.policies.nn.kv_cache import KVCache
from flexor.policies.nn.rope import Rope, make_rope
from flexor.policies.nn.transformer import DecoderNorm, TransformerLayer, TransformerSize, init_decoder


class ChunkAttention(NamedTuple):
    """Positions and masks of a chunk of actions, the same in all layers and integration steps."""

    rope: Rope
    """Of positions that continue the prefix's."""
    rope_from_zero: Rope
    mask: Tensor
    """[B, 1, 1 or rows, P + H]: the prefix and earlier actions."""
    prefix_mask: Tensor
    """[B, 1, 1, P]."""


def chunk_attention(size: TransformerSize, prefix_mask: Tensor, steps: int) -> ChunkAttention:
    """`prefix_mask` [B, P] is False for padding."""
    number = torch.arange(steps, device=prefix_mask.device)
    causal_mask = (number[:, None] >= number).expand(len(prefix_mask), 1, steps, steps)
    rows = prefix_mask[:, None, None]  # [B, 1, 1, P]
    mask = torch.cat((rows.expand(-1, -1, steps, -1), causal_mask), -1)
    return ChunkAttention(
        make_rope(prefix_mask.sum(1, keepdim=True) + number, size.head_dim, size.rope_theta),
        make_rope(number[None], size.head_dim, size.rope_theta),
        size.grouped(mask),
        rows,
    )


@dataclass
class ReusedPrefix:
    """A prefix that the integration steps of a prediction attend to: it is projected once."""

    cache: KVCache
    projected: KVCache | None = None


class CrossLayer(TransformerLayer):
    """Tokens attend only to a prefix, whose keys and values this layer projects again."""

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: Rope, mask: Tensor, prefix: KVCache | ReusedPrefix
    ) -> Tensor:
        queries = self.self_attn.queries(self.input_layernorm(x)[0], rope)
        return self.add_mlp(self.add(x, self.self_attn(queries, self._project(prefix), mask)))

    def _project(self, prefix: KVCache | ReusedPrefix) -> KVCache:
        if isinstance(prefix, KVCache):
            return self._project_cache(prefix)
        if prefix.projected is None:
            prefix.projected = self._project_cache(prefix.cache)
        return prefix.projected

    def _project_cache(self, cache: KVCache) -> KVCache:
        attention, dtype = self.self_attn, cache.keys.dtype
        keys, values = cache.keys.flatten(2), cache.values.flatten(2)
        if self.rounds_in_bf16:  # with weights in float32
            keys, values = keys.float(), values.float()
        keys, values = attention.k_proj(keys), attention.v_proj(values)
        if self.rounds_in_bf16 and keys.device.type != "cpu":  # fused attention takes one type
            keys, values = keys.to(dtype), values.to(dtype)
        return KVCache(attention.split_heads(keys), attention.split_heads(values))


class ActionExpert(nn.Module):
    def __init__(self, size: TransformerSize, kv_width: int, cross: bool, self_every: int):
        """`kv_width`: width of the language model's keys and values."""
        super().__init__()
        self.layers = nn.ModuleList(
            CrossLayer(size, kv_width)
            if cross and not is_self_attention(number, self_every)
            else TransformerLayer(size)
            for number in range(size.depth)
        )
        self.norm = DecoderNorm(size)
        init_decoder(self)

    def reusable(self, prefix: Sequence[KVCache]) -> list[KVCache | ReusedPrefix]:
        """The prefix of a prediction, for which the network runs several times."""
        return [
            ReusedPrefix(cache) if isinstance(layer, CrossLayer) else cache
            for layer, cache in zip(self.layers, prefix, strict=True)
        ]

    def forward(
        self, x: Tensor, attention: ChunkAttention, prefix: Sequence[KVCache | ReusedPrefix]
    ) -> Tensor:
        """Tokens [B, H, width] -> hidden states [B, H, width]. `prefix` has an entry for each layer."""
        for layer, cache in zip(self.layers, prefix, strict=True):
            if isinstance(layer, CrossLayer):
                x = layer(x, attention.rope_from_zero, attention.prefix_mask, cache)
            else:
                x, _ = layer(x, attention.rope, attention.mask, cache)
        return self.norm(x)[0]


def is_cross_layer(layer: int, attention_mode: str, self_every: int) -> bool:
    """Whether a layer of the expert attends to the prefix only."""
    return "cross" in attention_mode and not is_self_attention(layer, self_every)


def is_self_attention(layer: int, self_every: int) -> bool:
    return self_every > 0 and layer % self_every == 0


def layer_stride(vlm_layers: int, expert_layers: int, cross: bool, self_every: int) -> tuple[int, int]:
    """The number of layers of the expert, and of the language model's layers for each of them."""
    if expert_layers <= 0:
        return vlm_layers, 1
    if vlm_layers % expert_layers:
        raise ConfigError(
            f"policy.num_expert_layers={expert_layers} does not divide the {vlm_layers} layers of the language model "
            "(policy.num_vlm_layers)."
        )
    stride = vlm_layers // expert_layers
    # LeRobot decides by the number in the language model; where the two disagree, it does not run
    if cross and any(
        is_self_attention(n, self_every) != is_self_attention(n * stride, self_every)
        for n in range(expert_layers)
    ):
        raise ConfigError(
            f"policy.self_attn_every_n_layers={self_every} does not go with policy.num_expert_layers={expert_layers} "
            f"beside {vlm_layers} layers of the language model: set it to -1 or 1, or policy.num_expert_layers to -1."
        )
    return expert_layers, stride
