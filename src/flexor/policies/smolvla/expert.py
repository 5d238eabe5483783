"""The action expert: a narrower Llama over a noisy chunk, beside the language model.

Each of its layers attends to the keys and values of the language model's layer beside it. Some also attend to the
actions before (self-attention). The others (cross-attention) project the keys and values once more, and count positions
from the first action.
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


class Chunk(NamedTuple):
    """Positions and masks of a chunk of actions, the same in all layers and integration steps."""

    rope: Rope
    """Positions that go on where the prefix ends."""
    rope_alone: Rope
    """Positions from 0 on."""
    attend: Tensor
    """[B, 1, rows, P + H]: the prefix, and no later action."""
    attend_prefix: Tensor
    """[B, 1, 1, P]."""


def place_chunk(size: TransformerSize, valid: Tensor, steps: int) -> Chunk:
    """`valid` [B, P] is False for padding in the prefix."""
    number = torch.arange(steps, device=valid.device)
    earlier = (number[:, None] >= number).expand(len(valid), 1, steps, steps)
    prefix = valid[:, None, None]  # [B, 1, 1, P]
    attend = torch.cat((prefix.expand(-1, -1, steps, -1), earlier), -1)
    return Chunk(
        make_rope(valid.sum(1, keepdim=True) + number, size.head_dim, size.rope_theta),
        make_rope(number[None], size.head_dim, size.rope_theta),
        size.grouped(attend),
        prefix,
    )


@dataclass
class ReusedPrefix:
    """Keys and values that the steps of a prediction attend to one after the other: they are projected once."""

    given: KVCache
    projected: KVCache | None = None


class CrossLayer(TransformerLayer):
    """Tokens attend only to what came before them, whose keys and values this layer projects once more."""

    def __init__(self, size: TransformerSize, kv_width: int):
        super().__init__(size, kv_width)

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: Rope, attend: Tensor, before: KVCache | ReusedPrefix
    ) -> Tensor:
        queries = self.self_attn.queries(self.input_layernorm(x)[0], rope)
        return self.add_mlp(x + self.self_attn(queries, self._project(before), attend))

    def _project(self, before: KVCache | ReusedPrefix) -> KVCache:
        if isinstance(before, KVCache):
            return self._project_again(before)
        if before.projected is None:
            before.projected = self._project_again(before.given)
        return before.projected

    def _project_again(self, prefix: KVCache) -> KVCache:
        attention = self.self_attn
        keys, values = attention.k_proj(prefix.keys.flatten(2)), attention.v_proj(prefix.values.flatten(2))
        return KVCache(attention.split_heads(keys), attention.split_heads(values))


class ActionExpert(nn.Module):
    def __init__(self, size: TransformerSize, kv_input: int, cross: bool, self_every: int):
        """`kv_input`: width of the language model's keys and values."""
        super().__init__()
        self.layers = nn.ModuleList(
            CrossLayer(size, kv_input)
            if cross and not is_joint(number, self_every)
            else TransformerLayer(size)
            for number in range(size.depth)
        )
        self.norm = DecoderNorm(size)
        init_decoder(self)

    def reused(self, prefix: Sequence[KVCache]) -> list[KVCache | ReusedPrefix]:
        """The prefix of a prediction, for which the network runs several times."""
        return [
            ReusedPrefix(given) if isinstance(layer, CrossLayer) else given
            for layer, given in zip(self.layers, prefix, strict=True)
        ]

    def forward(self, x: Tensor, chunk: Chunk, prefix: Sequence[KVCache | ReusedPrefix]) -> Tensor:
        """Tokens [B, H, width] -> the same shape. `prefix` has the language model's layer for each layer here."""
        for layer, given in zip(self.layers, prefix, strict=True):
            if isinstance(layer, CrossLayer):
                x = layer(x, chunk.rope_alone, chunk.attend_prefix, given)
            else:
                x, _ = layer(x, chunk.rope, chunk.attend, given)
        return self.norm(x)[0]


def is_joint(layer: int, self_every: int) -> bool:
    """Whether a layer of the expert is one of self-attention."""
    return self_every > 0 and layer % self_every == 0


def layers_apart(vlm_layers: int, expert_layers: int, cross: bool, self_every: int) -> tuple[int, int]:
    """The number of layers of the expert, and of the language model's layers for each of them."""
    if expert_layers <= 0:
        return vlm_layers, 1
    if vlm_layers % expert_layers:
        raise ConfigError(
            f"policy.num_expert_layers={expert_layers} does not divide the {vlm_layers} layers of the language model "
            "(policy.num_vlm_layers)."
        )
    apart = vlm_layers // expert_layers
    # LeRobot decides by the number in the language model; where the two disagree, it does not run
    if cross and any(
        is_joint(n, self_every) != is_joint(n * apart, self_every) for n in range(expert_layers)
    ):
        raise ConfigError(
            f"policy.self_attn_every_n_layers={self_every} does not go with policy.num_expert_layers={expert_layers} "
            f"beside {vlm_layers} layers of the language model: set it to -1 or 1, or policy.num_expert_layers to -1."
        )
    return expert_layers, apart
