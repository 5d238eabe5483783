"""The layers of Llama (Touvron et al. 2023, https://arxiv.org/abs/2302.13971): SmolVLM2's language model has them.

A layer returns the keys and values of its tokens beside its output. So a prefix is computed once, and what follows
attends to it: tokens that come later never change what earlier ones computed. Parameter names are Llama's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.policies.nn.autocast import autocast_type
from flexor.policies.nn.fused_inference import attend_few, can_attend_few, gated, rms_norm
from flexor.policies.nn.rotary import KeysValues, Rotation


@dataclass(frozen=True)
class LlamaSize:
    """The size of a Llama. Several query heads share the keys and values of one of `kv_heads`."""

    width: int
    depth: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_width: int
    eps: float = 1e-6
    bias: bool = False
    """Whether the projections of attention have a bias."""

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width

    @property
    def shared(self) -> int:
        """Query heads that share keys and values."""
        return self.heads // self.kv_heads

    def scaled(self, factor: float) -> LlamaSize:
        """The same heads in a narrower or wider Llama, whose feed-forward layers have Llama's usual width."""
        width = int(self.width * factor)
        usual = 4 * int(2 * width / 3)
        return replace(self, width=width, mlp_width=256 * -(-usual // 256))


class LlamaAttention(nn.Module):
    """The projections of attention, and attention itself."""

    def __init__(self, size: LlamaSize, kv_input: int | None = None):
        """`kv_input`: width of what keys and values are projected from, if it is not the layer's input."""
        super().__init__()
        self.size = size
        self.q_proj = nn.Linear(size.width, size.heads * size.head_width, bias=size.bias)
        self.k_proj = nn.Linear(kv_input or size.width, size.kv_width, bias=size.bias)
        self.v_proj = nn.Linear(kv_input or size.width, size.kv_width, bias=size.bias)
        self.o_proj = nn.Linear(size.heads * size.head_width, size.width, bias=size.bias)

    def queries(self, x: Tensor, turn: Rotation) -> Tensor:
        return turn(self._heads(self.q_proj(x)))

    def keys_values(self, x: Tensor, turn: Rotation) -> KeysValues:
        return KeysValues(turn(self._heads(self.k_proj(x))), self._heads(self.v_proj(x)))

    def project_again(self, given: KeysValues) -> KeysValues:
        """Keys and values of another network as those of this one."""
        keys, values = self.k_proj(given.keys.flatten(2)), self.v_proj(given.values.flatten(2))
        return KeysValues(self._heads(keys), self._heads(values))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size.head_width))

    def forward(self, queries: Tensor, to: KeysValues, attend: Tensor) -> Tensor:
        """queries [B, Q, heads, head_width] -> [B, Q, width]. `attend` [B, 1, 1 or `shared` * Q, K] is False for hidden
        keys.

        Query heads that share keys and values become more rows of one head, instead of copying keys and values for each
        of them. So a mask whose rows differ is repeated, once for all layers.
        """
        shared, dtype = self.size.shared, to.values.dtype
        if can_attend_few(queries.to(dtype), to.values):
            rows = attend[:, :, : queries.shape[1]]
            return self.o_proj(attend_few(queries.to(dtype), to.keys.to(dtype), to.values, rows).flatten(2))
        stacked = queries.unflatten(2, (-1, shared)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        keys, values = to.keys.transpose(1, 2), to.values.transpose(1, 2)
        out = F.scaled_dot_product_attention(stacked.to(dtype), keys.to(dtype), values, attn_mask=attend)
        return self.o_proj(out.unflatten(2, (shared, -1)).permute(0, 3, 1, 2, 4).flatten(2))


class LlamaNorm(nn.RMSNorm):
    """In float32, whatever the types of input and weight: autocast does not see to it.

    The output has the type that autocast wants for matrix products: cast once, for all layers that get it.
    """

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return rms_norm(x, self.weight, 0.0, self.eps, autocast_type(x))


class LlamaMLP(nn.Module):
    def __init__(self, size: LlamaSize):
        super().__init__()
        self.gate_proj = nn.Linear(size.width, size.mlp_width, bias=False)
        self.up_proj = nn.Linear(size.width, size.mlp_width, bias=False)
        self.down_proj = nn.Linear(size.mlp_width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), "silu"))


class LlamaLayer(nn.Module):
    """Tokens attend to each other and to what came before them."""

    def __init__(self, size: LlamaSize, kv_input: int | None = None):
        super().__init__()
        self.self_attn = LlamaAttention(size, kv_input)
        self.mlp = LlamaMLP(size)
        self.input_layernorm = LlamaNorm(size.width, eps=size.eps)
        self.post_attention_layernorm = LlamaNorm(size.width, eps=size.eps)

    def forward(
        self,
        x: Tensor,
        turn: Rotation,
        attend: Tensor,
        before: KeysValues | None = None,
        only_keys: bool = False,
    ) -> tuple[Tensor, KeysValues]:
        """x [B, S, width] -> the same shape, and the keys and values of x. `attend` is as for `LlamaAttention`.

        `only_keys`: nobody reads the output, so it is not computed.
        """
        normed = self.input_layernorm(x)
        own = self.self_attn.keys_values(normed, turn)
        if only_keys:
            return x, own
        everything = own if before is None else before.then(own)
        return self.finish(x, self.self_attn(self.self_attn.queries(normed, turn), everything, attend)), own

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclass
class ReusedPrefix:
    """Keys and values that the steps of a prediction attend to one after the other: they are projected once."""

    given: KeysValues
    projected: KeysValues | None = None


class CrossLayer(LlamaLayer):
    """Tokens attend only to what came before them, whose keys and values this layer projects once more."""

    def __init__(self, size: LlamaSize, kv_input: int):
        super().__init__(size, kv_input)

    def forward(  # type: ignore[override]
        self, x: Tensor, turn: Rotation, attend: Tensor, before: KeysValues | ReusedPrefix
    ) -> Tensor:
        queries = self.self_attn.queries(self.input_layernorm(x), turn)
        return self.finish(x, self.self_attn(queries, self._project(before), attend))

    def _project(self, before: KeysValues | ReusedPrefix) -> KeysValues:
        if isinstance(before, KeysValues):
            return self.self_attn.project_again(before)
        if before.projected is None:
            before.projected = self.self_attn.project_again(before.given)
        return before.projected


@torch.no_grad()
def start_llama(module: nn.Module, spread: float = 0.02) -> None:
    """Initial values of a Llama without pretrained weights."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=spread)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
