"""Gemma's decoder (Gemma Team 2024, https://arxiv.org/abs/2403.08295), also with a condition as in pi0.5.

A policy has two of them. The first reads a prompt, which is images and text. The second reads what is observed and done
besides, and attends to the prompt through the keys and values of the first. The prompt does not depend on the second,
so its keys and values are computed once: for the loss, and for all steps of an inference.

Parameter names are those of `transformers`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.policies.nn.autocast import autocast_type
from flexor.policies.nn.fused_inference import attend_few, can_attend_few, gated, rms_norm
from flexor.policies.nn.rotary import KeysValues, RoomForMore, Rotation, rotation

EPSILON = 1e-6  # of norms


@dataclass(frozen=True)
class GemmaSize:
    width: int
    depth: int
    mlp_width: int
    heads: int = 8
    kv_heads: int = 1
    head_dim: int = 256

    def shares_attention(self, other: GemmaSize) -> bool:
        """Whether one can attend to the keys and values of the other, layer by layer."""
        return (self.depth, self.kv_heads, self.head_dim) == (other.depth, other.kv_heads, other.head_dim)


class GemmaNorm(nn.Module):
    """RMS normalisation. A condition, if there is one, scales and shifts it, and gates what is added after it."""

    def __init__(self, dim: int, condition_dim: int | None = None):
        super().__init__()
        self.dim = dim
        if condition_dim is None:
            self.weight = nn.Parameter(torch.zeros(dim))
            return
        self.dense = nn.Linear(condition_dim, 3 * dim)
        nn.init.zeros_(self.dense.weight)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """x [B, S, D], condition [B, C] -> the normalised x, and the gate [B, 1, D]."""
        out = autocast_type(x)  # once, for all layers that get it
        if condition is None:
            return rms_norm(x, self.weight, 1.0, EPSILON, out), None
        scale, shift, gate = self.dense(condition)[:, None].float().chunk(3, dim=-1)
        normed = F.rms_norm(x.float(), (self.dim,), None, EPSILON)
        return (normed * (1 + scale) + shift).to(out), gate.to(out)


class GemmaAttention(nn.Module):
    """Attention in which several query heads share a key and a value."""

    def __init__(self, size: GemmaSize):
        super().__init__()
        self.head_dim, self.groups = size.head_dim, size.heads // size.kv_heads
        self.q_proj = nn.Linear(size.width, size.heads * size.head_dim, bias=False)
        self.k_proj = nn.Linear(size.width, size.kv_heads * size.head_dim, bias=False)
        self.v_proj = nn.Linear(size.width, size.kv_heads * size.head_dim, bias=False)
        self.o_proj = nn.Linear(size.heads * size.head_dim, size.width, bias=False)

    def keys_values(self, x: Tensor, turn: Rotation) -> KeysValues:
        return KeysValues(turn(self._heads(self.k_proj(x))), self._heads(self.v_proj(x)))

    def attend(self, x: Tensor, turn: Rotation, seen: KeysValues, mask: Tensor) -> Tensor:
        """x [B, Q, D] attends to what is seen [B, K, kv_heads, head_dim] where the mask is true."""
        q = turn(self._heads(self.q_proj(x)))
        if can_attend_few(q, seen.keys):
            return self.o_proj(attend_few(q, *seen, mask).flatten(2))
        k, v = (
            each.transpose(1, 2)[:, :, None].expand(-1, -1, self.groups, -1, -1).flatten(1, 2)
            for each in seen
        )  # a view: of one key and value, no copies are made
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class GemmaMLP(nn.Module):
    def __init__(self, size: GemmaSize):
        super().__init__()
        self.gate_proj = nn.Linear(size.width, size.mlp_width, bias=False)
        self.up_proj = nn.Linear(size.width, size.mlp_width, bias=False)
        self.down_proj = nn.Linear(size.mlp_width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), "gelu"))


class GemmaLayer(nn.Module):
    def __init__(self, size: GemmaSize, condition_dim: int | None = None):
        super().__init__()
        self.self_attn = GemmaAttention(size)
        self.mlp = GemmaMLP(size)
        self.input_layernorm = GemmaNorm(size.width, condition_dim)
        self.post_attention_layernorm = GemmaNorm(size.width, condition_dim)

    def forward(
        self,
        x: Tensor,
        turn: Rotation,
        mask: Tensor,
        before: KeysValues | RoomForMore | None = None,
        condition: Tensor | None = None,
        only_keys: bool = False,
    ) -> tuple[Tensor, KeysValues]:
        """x [B, S, D] -> [B, S, D], and its own keys and values.

        It attends to itself and to `before`; mask [B, 1, S or 1, tokens before + S]. With `only_keys`, x is returned
        as it is: of the last layer of a prompt, nothing else is used.
        """
        normed, gate = self.input_layernorm(x, condition)
        own = self.self_attn.keys_values(normed, turn)
        if only_keys:
            return x, own
        seen = own if before is None else before.then(own)
        x = _add(x, self.self_attn.attend(normed, turn, seen, mask), gate)
        normed, gate = self.post_attention_layernorm(x, condition)
        return _add(x, self.mlp(normed), gate), own


def _add(x: Tensor, more: Tensor, gate: Tensor | None) -> Tensor:
    return x + (more if gate is None else more * gate)


class TokenEmbedding(nn.Embedding):
    """Vectors of tokens, as long as Gemma expects them."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.embedding_dim**0.5


class GemmaDecoder(nn.Module):
    """The layers. With a vocabulary it also reads tokens, with a condition its norms depend on it."""

    def __init__(self, size: GemmaSize, vocabulary: int | None = None, condition_dim: int | None = None):
        super().__init__()
        self.size = size
        if vocabulary is not None:
            self.embed_tokens = TokenEmbedding(vocabulary, size.width)
        self.layers = nn.ModuleList(GemmaLayer(size, condition_dim) for _ in range(size.depth))
        self.norm = GemmaNorm(size.width, condition_dim)
        self.apply(_start)

    def read(self, x: Tensor, positions: Tensor, mask: Tensor) -> list[KeysValues]:
        """The keys and values of a prompt x [B, S, D] in every layer."""
        turn, x = rotation(positions, self.size.head_dim), self._as_weights(x)
        found = []
        for number, layer in enumerate(self.layers, 1):
            x, own = layer(x, turn, mask, only_keys=number == len(self.layers))
            found.append(own)
        return found

    def freeze_unused(self) -> None:
        """Exclude from training what `read` does not use: DDP expects a gradient of everything else."""
        last = self.layers[-1]
        assert isinstance(last, GemmaLayer)
        modules: list[nn.Module] = [self.norm, last.mlp, last.post_attention_layernorm]
        for unused in (*modules, last.self_attn.q_proj, last.self_attn.o_proj):
            unused.requires_grad_(False)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        prompt: list[KeysValues],
        condition: Tensor | None = None,
    ) -> Tensor:
        """x [B, S, D] -> [B, S, D]; it attends to itself and to a prompt."""
        turn, x = rotation(positions, self.size.head_dim), self._as_weights(x)
        for layer, before in zip(self.layers, prompt, strict=True):
            x, _ = layer(x, turn, mask, before, condition)
        return self.norm(x, condition)[0]

    def _as_weights(self, x: Tensor) -> Tensor:
        """In the type of the weights, which may be bfloat16."""
        return x.to(self.get_parameter("layers.0.self_attn.k_proj.weight").dtype)


def _start(module: nn.Module) -> None:
    """Initial values of a Gemma without pretrained weights."""
    if isinstance(module, nn.Embedding) or (isinstance(module, nn.Linear) and module.bias is None):
        nn.init.normal_(module.weight, std=0.02)
