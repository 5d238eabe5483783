"""The action expert: a narrower Llama over a noisy chunk, beside the language model.

Each of its layers attends to the keys and values of the language model's layer beside it. Some also attend to the
actions before (self-attention). The others (cross-attention) project the keys and values once more, and count positions
from the first action.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flexor.core.errors import ConfigError
from flexor.policies.nn.llama import (
    CrossLayer,
    LlamaLayer,
    LlamaNorm,
    LlamaSize,
    ReusedPrefix,
    start_llama,
)
from flexor.policies.nn.rotary import KeysValues, Rotation, rotation


class Chunk(NamedTuple):
    """Positions and masks of a chunk of actions, the same in all layers and integration steps."""

    turn: Rotation
    """Positions that go on where the prefix ends."""
    turn_alone: Rotation
    """Positions from 0 on."""
    attend: Tensor
    """[B, 1, rows, P + H]: the prefix, and no later action."""
    attend_prefix: Tensor
    """[B, 1, 1, P]."""


def place_chunk(size: LlamaSize, valid: Tensor, steps: int) -> Chunk:
    """`valid` [B, P] is False for padding in the prefix."""
    number = torch.arange(steps, device=valid.device)
    earlier = (number[:, None] >= number).expand(len(valid), 1, steps, steps)
    prefix = valid[:, None, None]  # [B, 1, 1, P]
    attend = torch.cat((prefix.expand(-1, -1, steps, -1), earlier), -1)
    return Chunk(
        rotation(valid.sum(1, keepdim=True) + number, size.head_width),
        rotation(number[None], size.head_width),
        attend.repeat(1, 1, size.shared, 1),
        prefix,
    )


class ActionExpert(nn.Module):
    def __init__(self, size: LlamaSize, kv_input: int, cross: bool, self_every: int):
        """`kv_input`: width of the language model's keys and values."""
        super().__init__()
        self.layers = nn.ModuleList(
            CrossLayer(size, kv_input) if cross and not is_joint(number, self_every) else LlamaLayer(size)
            for number in range(size.depth)
        )
        self.norm = LlamaNorm(size.width, eps=size.eps)
        start_llama(self)

    def reused(self, prefix: Sequence[KeysValues]) -> list[KeysValues | ReusedPrefix]:
        """The prefix of a prediction, for which the network runs several times."""
        return [
            ReusedPrefix(given) if isinstance(layer, CrossLayer) else given
            for layer, given in zip(self.layers, prefix, strict=True)
        ]

    def forward(self, x: Tensor, chunk: Chunk, prefix: Sequence[KeysValues | ReusedPrefix]) -> Tensor:
        """Tokens [B, H, width] -> the same shape. `prefix` has the language model's layer for each layer here."""
        for layer, given in zip(self.layers, prefix, strict=True):
            if isinstance(layer, CrossLayer):
                x = layer(x, chunk.turn_alone, chunk.attend_prefix, given)
            else:
                x, _ = layer(x, chunk.turn, chunk.attend, given)
        return self.norm(x)


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
