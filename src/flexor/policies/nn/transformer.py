"""The decoder of language models: Gemma, Llama, Qwen2.5 and Qwen3 are sizes of it.

A layer returns the keys and values of its tokens beside its output. So a prefix (images and text) is computed once,
and a suffix attends to it through a KV cache, in the same decoder or in another one of the same heads: an action
expert. The prefix never attends to the suffix, so its cache serves the loss, and all steps of a prediction.

Parameter names are those of `transformers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.kernels.language_model import attend_few, can_attend_few, gated, rms_norm
from flexor.policies.nn.autocast import autocast_type
from flexor.policies.nn.kv_cache import KVCache, StaticKVCache
from flexor.policies.nn.rope import Rope, apply_rope, make_rope

Cache = KVCache | StaticKVCache


@dataclass(frozen=True)
class TransformerSize:
    """The size of a decoder, and what differs between families."""

    width: int
    depth: int
    mlp_width: int
    heads: int
    kv_heads: int
    """Each is shared by heads / kv_heads query heads."""
    head_dim: int
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    """Added to the weights of norms: 1 in Gemma."""
    activation: Literal["gelu", "silu"] = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """Normalise each head's queries and keys, as Qwen3 does."""
    embed_scale: float = 1.0
    """Embeddings of tokens are multiplied by it: sqrt(width) in Gemma."""
    rope_theta: float = 10_000.0
    mrope_sections: tuple[int, int, int] | None = None
    """Positions are [3, B, S], and so many frequencies belong to time, row and column."""
    mrope_interleaved: bool = False
    condition_dim: int | None = None
    """Width of the condition that scales, shifts and gates, as in pi0.5; None: there is none."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **differences: Any) -> TransformerSize:
        """The size in a config.json of `transformers`, in which all families use the same names."""
        width, heads = config["hidden_size"], config["num_attention_heads"]
        return cls(
            width,
            depth=config["num_hidden_layers"],
            mlp_width=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or width // heads,
            norm_eps=config["rms_norm_eps"],
            **differences,
        )

    @property
    def groups(self) -> int:
        """Query heads that share keys and values."""
        return self.heads // self.kv_heads

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def can_attend_to(self, other: TransformerSize) -> bool:
        """Whether it can attend to the keys and values of the other, layer by layer."""
        return (self.depth, self.kv_heads, self.head_dim) == (other.depth, other.kv_heads, other.head_dim)

    def scaled(self, factor: float) -> TransformerSize:
        """The same heads in a narrower or wider decoder, whose feed-forward layers have Llama's usual width."""
        width = int(self.width * factor)
        usual = 4 * int(2 * width / 3)
        return replace(self, width=width, mlp_width=256 * -(-usual // 256))

    def grouped(self, mask: Tensor) -> Tensor:
        """A mask [B, 1, Q or 1, K] as `SelfAttention` takes it: where its rows differ, [B, 1, groups * Q, K].

        Computed once for all layers.
        """
        return mask if self.kv_heads == 1 or mask.shape[2] == 1 else mask.repeat(1, 1, self.groups, 1)


class DecoderNorm(nn.Module):
    """RMS normalisation. A condition, if there is one, scales and shifts it, and gates what is added after it."""

    def __init__(self, size: TransformerSize, dim: int | None = None, condition_dim: int | None = None):
        super().__init__()
        self.eps, self.offset, self.dim = size.norm_eps, size.norm_offset, dim or size.width
        self.rounds_in_bf16 = False
        if condition_dim is None:
            self.weight = nn.Parameter(torch.full((self.dim,), 1 - self.offset))
            return
        self.dense = nn.Linear(condition_dim, 3 * self.dim)
        nn.init.zeros_(self.dense.weight)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """x [..., D], condition [B, C] -> the normalised x, and the gate [B, 1, D].

        Computed in float32; the output has autocast's type: cast once, for all layers that get it.
        """
        if self.rounds_in_bf16:
            return rms_norm(x, self.weight, self.offset, self.eps, self.weight.dtype, round_normed=True), None
        out = autocast_type(x)
        if condition is None:
            return rms_norm(x, self.weight, self.offset, self.eps, out), None
        scale, shift, gate = self.dense(condition)[:, None].float().chunk(3, dim=-1)
        normed = F.rms_norm(x.float(), (self.dim,), None, self.eps)
        return (normed * (1 + scale) + shift).to(out), gate.to(out)


class SelfAttention(nn.Module):
    """Grouped-query attention: several query heads share a key and a value."""

    def __init__(self, size: TransformerSize, kv_width: int | None = None):
        """`kv_width`: width of what keys and values are projected from, if it is not the layer's input."""
        super().__init__()
        self.head_dim, self.groups, self.kv_heads = size.head_dim, size.groups, size.kv_heads
        self.rounds_in_bf16 = False
        query_width = size.heads * size.head_dim
        self.q_proj = nn.Linear(size.width, query_width, bias=size.qkv_bias)
        self.k_proj = nn.Linear(kv_width or size.width, size.kv_width, bias=size.qkv_bias)
        self.v_proj = nn.Linear(kv_width or size.width, size.kv_width, bias=size.qkv_bias)
        self.o_proj = nn.Linear(query_width, size.width, bias=size.o_bias)
        self.q_norm = DecoderNorm(size, size.head_dim) if size.qk_norm else None
        self.k_norm = DecoderNorm(size, size.head_dim) if size.qk_norm else None

    def queries(self, x: Tensor, rope: Rope) -> Tensor:
        """x [B, Q, D] -> [B, Q, heads, head_dim]."""
        q = self.split_heads(self.q_proj(x))
        return apply_rope(q if self.q_norm is None else self.q_norm(q)[0], rope)

    def keys_values(self, x: Tensor, rope: Rope) -> KVCache:
        k = self.split_heads(self.k_proj(x))
        k = k if self.k_norm is None else self.k_norm(k)[0]
        return KVCache(apply_rope(k, rope), self.split_heads(self.v_proj(x)))

    def split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def forward(self, q: Tensor, cache: KVCache, mask: Tensor) -> Tensor:
        """Queries [B, Q, heads, head_dim] -> [B, Q, D]. They attend where the mask is true.

        The mask is [B, 1, 1 or Q, K], made by `TransformerSize.grouped`.
        """
        if self.rounds_in_bf16 and q.device.type == "cpu":
            return self.o_proj(self._attend_step_by_step(q, cache, mask))
        keys, values = cache.keys.to(cache.values.dtype), cache.values
        q = q.to(values.dtype)
        if can_attend_few(q, keys):
            return self.o_proj(attend_few(q, keys, values, mask[:, :, : q.shape[1]]).flatten(2))
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if self.kv_heads == 1:  # a view of the only key: no copies are made
            keys, values = (kv.expand(-1, self.groups, -1, -1) for kv in (keys, values))
            out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask)
            return self.o_proj(out.transpose(1, 2).flatten(2))
        # queries that share a key become rows of one head, rather than copies of the key for each of them
        rows = q.unflatten(2, (-1, self.groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
        return self.o_proj(out.unflatten(2, (self.groups, -1)).permute(0, 3, 1, 2, 4).flatten(2))

    def _attend_step_by_step(self, q: Tensor, cache: KVCache, mask: Tensor) -> Tensor:
        """The same with the roundings of LeRobot: only the weights of the values are in their type. [B, Q, D]"""
        keys = cache.keys.float().permute(0, 2, 3, 1)  # [B, kv_heads, head_dim, K]
        rows = q.float().unflatten(2, (-1, self.groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        scores = (rows @ keys * self.head_dim**-0.5).masked_fill(~mask, torch.finfo(torch.float32).min)
        out = scores.softmax(-1).to(cache.values.dtype) @ cache.values.transpose(1, 2)
        out = out.unflatten(2, (self.groups, -1)).permute(0, 3, 1, 2, 4).flatten(2)
        weight = self.o_proj.weight  # if it is quantized, it takes any type
        return out.to(weight.dtype) if weight.is_floating_point() else out


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int, activation: Literal["gelu", "silu"], bias: bool = False):
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(width, hidden, bias=bias)
        self.up_proj = nn.Linear(width, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.activation))


class TransformerLayer(nn.Module):
    def __init__(self, size: TransformerSize, kv_width: int | None = None):
        super().__init__()
        self.self_attn = SelfAttention(size, kv_width)
        self.mlp = GatedMLP(size.width, size.mlp_width, size.activation)
        self.input_layernorm = DecoderNorm(size, condition_dim=size.condition_dim)
        self.post_attention_layernorm = DecoderNorm(size, condition_dim=size.condition_dim)
        self.rounds_in_bf16 = False

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        mask: Tensor,
        cache: Cache | None = None,
        condition: Tensor | None = None,
        kv_only: bool = False,
    ) -> tuple[Tensor, KVCache]:
        """x [B, S, D] -> [B, S, D], and its keys and values.

        x attends to itself and to `cache`; mask [B, 1, 1 or groups * S, cached + S]. With `kv_only`, x is returned as
        it is: of the last layer of a prefix, nothing else is used.
        """
        x, new = self.attend(x, rope, mask, cache, condition, kv_only)
        return x if kv_only else self.add_mlp(x, condition), new

    def attend(
        self,
        x: Tensor,
        rope: Rope,
        mask: Tensor,
        cache: Cache | None,
        condition: Tensor | None,
        kv_only: bool,
    ) -> tuple[Tensor, KVCache]:
        """The first half of the layer."""
        normed, gate = self.input_layernorm(x, condition)
        new = self.self_attn.keys_values(normed, rope)
        if kv_only:
            return x, new
        keys_values = new if cache is None else cache.append(new)
        attended = self.self_attn(self.self_attn.queries(normed, rope), keys_values, mask)
        return self.add(x, attended, gate), new

    def add_mlp(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        normed, gate = self.post_attention_layernorm(x, condition)
        return self.add(x, self.mlp(normed), gate)

    def add(self, x: Tensor, update: Tensor, gate: Tensor | None = None) -> Tensor:
        x = x + (update if gate is None else update * gate)
        return x.to(update.dtype) if self.rounds_in_bf16 else x


class TokenEmbedding(nn.Embedding):
    """Vectors of tokens, scaled as the layers expect them."""

    def __init__(self, vocabulary: int, size: TransformerSize):
        super().__init__(vocabulary, size.width)
        self.scale = size.embed_scale
        self.has_scaled_weight = False
        self.rounds_output = False
        """Whether its output is rounded to autocast's type before anything else is computed with it."""

    def forward(self, tokens: Tensor) -> Tensor:
        embeds = super().forward(tokens)
        return embeds if self.scale == 1 or self.has_scaled_weight else embeds * self.scale


class Transformer(nn.Module):
    """The layers and the last norm; with a vocabulary also the embedding of tokens."""

    def __init__(
        self,
        size: TransformerSize,
        vocabulary: int | None = None,
        make_layer: Callable[[TransformerSize], TransformerLayer] = TransformerLayer,
    ):
        super().__init__()
        self.size = size
        self.residual_dtype: torch.dtype | None = None
        """The type of hidden states between layers, if it is not that of the weights."""
        if vocabulary is not None:
            self.embed_tokens = TokenEmbedding(vocabulary, size)
        self.layers = nn.ModuleList(make_layer(size) for _ in range(size.depth))
        self.norm = DecoderNorm(size, condition_dim=size.condition_dim)
        init_decoder(self)

    @property
    def dtype(self) -> torch.dtype:
        """The type of hidden states between layers: that of the weights, which may be bfloat16."""
        return self.residual_dtype or self.get_parameter("layers.0.self_attn.k_proj.weight").dtype

    def rope(self, positions: Tensor) -> Rope:
        """The embedding of positions [B, S], or [3, B, S] with `mrope_sections`."""
        size = self.size
        return make_rope(
            positions, size.head_dim, size.rope_theta, size.mrope_sections, size.mrope_interleaved
        )

    def prefill(
        self,
        x: Tensor,
        rope: Rope,
        mask: Tensor,
        cache: Sequence[Cache] | None = None,
        depth: int | None = None,
    ) -> list[KVCache]:
        """The keys and values of a prefix x [B, S, D] in the first `depth` layers; None: in all.

        x attends to itself, and to `cache` before it, where mask [B, 1, S or 1, cached + S] is true.
        """
        depth = depth or self.size.depth
        mask = self.size.grouped(mask)
        caches = []
        for number in range(depth):
            earlier = cache[number] if cache else None
            x, new = self.layers[number](x, rope, mask, earlier, kv_only=number + 1 == depth)
            caches.append(new)
        return caches

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        mask: Tensor,
        cache: Sequence[Cache] | None = None,
        condition: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, S, D] of x [B, S, D], which attends to itself and to `cache`, as in `prefill`."""
        mask = self.size.grouped(mask)
        for number, layer in enumerate(self.layers):
            x, _ = layer(x, rope, mask, cache[number] if cache else None, condition)
        return self.norm(x, condition)[0]

    def freeze_unused_by_prefill(self) -> None:
        """Exclude from training what `prefill` does not use: DDP expects a gradient of everything else."""
        last = self.layers[-1]
        assert isinstance(last, TransformerLayer)
        attention = last.self_attn
        for unused in (
            self.norm,
            last.mlp,
            last.post_attention_layernorm,
            attention.q_proj,
            attention.o_proj,
        ):
            unused.requires_grad_(False)


def fix_residual_dtypes(network: nn.Module) -> None:
    """From here on, the type of hidden states between layers does not change with the type of the weights."""
    for transformer in filter(lambda module: isinstance(module, Transformer), network.modules()):
        assert isinstance(transformer, Transformer)
        transformer.residual_dtype = transformer.dtype


def round_in_bf16(network: nn.Module) -> None:
    """For weights in bfloat16 without autocast: from now on, its layers round where those of LeRobot round.

    That is after each addition, after a norm and again after its weights. Scores of attention are in float32.
    """
    for module in network.modules():
        if isinstance(module, DecoderNorm | SelfAttention | TransformerLayer):
            module.rounds_in_bf16 = True


def language_head(decoder: Transformer, tied: bool = False) -> nn.Linear:
    """Hidden states -> logits. `tied`: its weight is the embedding's, one parameter under two names."""
    vocabulary, width = decoder.embed_tokens.weight.shape
    head = nn.Linear(width, vocabulary, bias=False)
    if tied:
        head.weight = decoder.embed_tokens.weight
    else:
        init_decoder(head)
    return head


def init_decoder(network: nn.Module, std: float = 0.02) -> None:
    """Initial values of decoder layers and projections without pretrained weights. Adaptive norms start neutral."""
    neutral = {m.dense for m in network.modules() if isinstance(m, DecoderNorm) and hasattr(m, "dense")}
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and module not in neutral:
            nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
