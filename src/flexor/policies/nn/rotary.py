"""What the attention of language models shares: rotated positions, and keys and values that later tokens attend to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexor.policies.nn.fused_inference import rotate


class KeysValues(NamedTuple):
    """The keys and values of one layer, each [B, S, kv_heads, head width]; keys are rotated. Never written to."""

    keys: Tensor
    values: Tensor

    def then(self, later: KeysValues) -> KeysValues:
        return KeysValues(torch.cat((self.keys, later.keys), 1), torch.cat((self.values, later.values), 1))


class RoomForMore(NamedTuple):
    """Keys and values with room after them: what comes later is written into it, at a place [1] that is a tensor too.

    So its shape stays the same, and a CUDA graph can write to it. What has not been written must be masked.
    """

    keys: Tensor
    values: Tensor
    place: Tensor

    @classmethod
    def after(cls, before: KeysValues, tokens: int, place: Tensor) -> RoomForMore:
        def longer(x: Tensor) -> Tensor:
            return torch.cat((x, x.new_zeros(len(x), tokens, *x.shape[2:])), 1)

        return cls(longer(before.keys), longer(before.values), place)

    def then(self, later: KeysValues) -> KeysValues:
        self.keys.index_copy_(1, self.place, later.keys)
        self.values.index_copy_(1, self.place, later.values)
        return KeysValues(self.keys, self.values)


class Rotation(NamedTuple):
    """Rotary position embedding (https://arxiv.org/abs/2104.09864): a token is turned by an angle per channel pair."""

    cos: Tensor  # [B, S, 1, head width]
    sin: Tensor  # negative for the first channel of a pair

    def __call__(self, x: Tensor) -> Tensor:
        """[B, S, heads, head width], turned: channels i and i + half are a point in a plane."""
        return rotate(x, self.cos, self.sin)

    def of(self, tokens: slice) -> Rotation:
        """That of some of the tokens."""
        return Rotation(self.cos[:, tokens], self.sin[:, tokens])


def rotation(positions: Tensor, head_width: int, base: float = 10_000.0) -> Rotation:
    """The rotation of tokens at these positions [B, S], in float32; computed once for all layers."""
    channel = torch.arange(0, head_width, 2, device=positions.device).float()
    angle = positions[..., None, None].float() / base ** (channel / head_width)
    sin = angle.sin()
    return Rotation(angle.cos().repeat(1, 1, 1, 2), torch.cat((-sin, sin), dim=-1))
