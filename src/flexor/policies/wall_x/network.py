"""WALL-X's network: a Qwen2.5-VL whose layers have an expert for the tokens of actions, and the layers around it.

Actions are the last tokens of a sequence, in every sample. So an expert's tokens are a slice, which the host knows.

              words and images   actions
    words   |     causal       |    0        expert 0
    actions |       1          |    1        expert 1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.policies.nn.kv_cache import KVCache
from flexor.policies.nn.rope import Rope
from flexor.policies.nn.transformer import (
    Cache,
    DecoderNorm,
    GatedMLP,
    Transformer,
    TransformerLayer,
    TransformerSize,
    language_head,
)
from flexor.policies.vlm.decode import DecodeState
from flexor.policies.vlm.qwen2_5_images import ImageGrid
from flexor.policies.vlm.qwen2_5_vision import QwenVision
from flexor.policies.vlm.qwen2_5_vl import QwenSequence, causal_mask
from flexor.policies.wall_x.size import ACTIONS, WORDS, Expert, WallXSize

LONGEST_PERIOD = 10_000.0  # of the embedding of time, over 2 pi


class ExpertMLPs(nn.Module):
    """A feed-forward layer for each kind of tokens."""

    def __init__(self, experts: Sequence[Expert]):
        super().__init__()
        self.widths = [expert.width for expert in experts]
        self.experts = nn.ModuleList(GatedMLP(expert.width, expert.mlp_width, "silu") for expert in experts)

    def forward(self, x: Tensor, kind: int) -> Tensor:
        """Tokens of one kind [B, S, D] -> the same shape. Channels that the expert does not read get zeros."""
        width, rest = self.widths[kind], x.shape[-1] - self.widths[kind]
        out = self.experts[kind](x[..., :width])
        return F.pad(out, (0, rest)) if rest else out


class RoutedLayer(TransformerLayer):
    """A layer of a decoder with experts."""

    def __init__(self, size: TransformerSize, experts: Sequence[Expert]):
        super().__init__(size)
        self.routes = bool(experts)
        if experts:
            del self.mlp
            self.moe = ExpertMLPs(experts)

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        mask: Tensor,
        cache: Cache | None = None,
        condition: Tensor | None = None,
        kv_only: bool = False,
        actions: int = 0,
    ) -> tuple[Tensor, KVCache]:
        """As of any layer; the last `actions` tokens of x stand for actions."""
        x, new = self.attend(x, rope, mask, cache, condition, kv_only)
        if kv_only:
            return x, new
        if not self.routes:
            return self.add_mlp(x, condition), new
        words = x.shape[1] - actions
        parts = ((WORDS, x[:, :words]), (ACTIONS, x[:, words:]))
        outputs = [self.route(part, kind) for kind, part in parts if part.shape[1]]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), new

    def route(self, x: Tensor, kind: int) -> Tensor:
        """The second half of the layer, for tokens of one kind."""
        return self.add(x, self.moe(self.post_attention_layernorm(x)[0], kind))


class RoutedTransformer(Transformer):
    """The decoder. Its parameters are in the order of LeRobot's, by which an optimizer's state is numbered."""

    def __init__(self, size: TransformerSize, vocabulary: int, experts: Sequence[Expert]):
        super().__init__(size, vocabulary, partial(RoutedLayer, experts=experts))
        layers = self.layers
        del self.layers
        self.layers = layers
        self.norm.rounds_in_bf16 = True  # its input is rounded, its output is not

    def hidden(
        self, x: Tensor, rope: Rope, mask: Tensor, cache: Sequence[Cache] | None = None, actions: int = 0
    ) -> Tensor:
        """As `forward`; the last `actions` tokens of x stand for actions."""
        mask = self.size.grouped(mask)
        for number, layer in enumerate(self.layers):
            x, _ = layer(x, rope, mask, cache[number] if cache else None, actions=actions)
        return self.norm(x)[0]


class WallXActionHead(nn.Module):
    """States and noisy actions -> tokens, and hidden states -> velocities. It also reads which values are real."""

    def __init__(self, width: int, action_values: int, state_values: int):
        super().__init__()
        self.width = width
        self.w1 = nn.Linear(2 * action_values, width, bias=False)
        self.w2 = nn.Linear(2 * width, width, bias=False)
        self.w3 = nn.Linear(width, width, bias=False)
        self.action_proj_back = nn.Linear(width, action_values, bias=False)
        self.propri_proj = nn.Linear(2 * state_values, width, bias=False)

    def embed_actions(self, actions: Tensor, real: Tensor, time: Tensor) -> Tensor:
        """Noisy actions and which values are real, [B, H, A] each, at a time [B] -> [B, H, width]."""
        x = self.w1(torch.cat((actions, real), -1))
        times = time_embedding(time, self.width)[:, None].expand_as(x)
        return self.w3(F.silu(self.w2(torch.cat((x, times.to(x.dtype)), -1))))

    def embed_state(self, state: Tensor, real: Tensor) -> Tensor:
        """[B, A] each -> [B, 1, width]."""
        return self.propri_proj(torch.cat((state, real), -1))[:, None]


def time_embedding(time: Tensor, width: int) -> Tensor:
    """Times [B] -> [B, width]: sines, then cosines, of frequencies from 1 to 1 / 10,000."""
    half = width // 2
    step = math.log(LONGEST_PERIOD) / (half - 1)
    angle = time[:, None] * (torch.arange(half, device=time.device) * -step).exp()
    return torch.cat((angle.sin(), angle.cos()), -1)


class ChunkContext(NamedTuple):
    """An observation, to which a chunk of actions attends."""

    prefix: Tensor | list[KVCache]
    """Embedded [B, P, width]; when the policy acts, the keys and values of every layer."""
    rope: Rope
    """Of the prefix and the actions."""
    mask: Tensor
    """[B, 1, P + H, P + H]."""


class WallXNetwork(QwenSequence):
    """The names of its parts are those of `transformers` before 4.52, as in LeRobot."""

    def __init__(self, size: WallXSize, grids: Sequence[ImageGrid]):
        super().__init__(size.vlm, grids)
        text = size.vlm.text
        self.model = RoutedTransformer(text, size.vlm.vocabulary, size.experts)
        self.lm_head = language_head(self.model, size.vlm.tied)
        self.visual = QwenVision(size.vlm.vision, grids)
        self.action_preprocessor = WallXActionHead(text.width, size.action_values, size.state_values)

    @property
    def vision(self) -> QwenVision:
        return self.visual

    @property
    def language_model(self) -> RoutedTransformer:
        return self.model

    def cast_to_bf16(self) -> None:
        """All weights but those of the decoder's norms and of the layers around it."""
        norms = [module for module in self.model.modules() if isinstance(module, DecoderNorm)]
        float32 = {weight for module in (*norms, self.action_preprocessor) for weight in module.parameters()}
        for weight in self.parameters():
            if weight not in float32:
                weight.data = weight.data.bfloat16()

    def freeze_unused(self, writes: bool) -> None:
        """Exclude from training what has no part in the loss. `writes`: actions are words, as in fast mode."""
        head = self.action_preprocessor
        unused: list[nn.Module] = []
        if writes:
            unused += [head.w1, head.w2, head.w3, head.action_proj_back]
        elif not self.size.tied:
            unused.append(self.lm_head)
        for experts in (module for module in self.model.modules() if isinstance(module, ExpertMLPs)):
            unused += experts.experts[ACTIONS if writes else ACTIONS + 1 :]
        for module in unused:
            module.requires_grad_(False)

    def embed_prompt(self, tokens: Tensor, images: Tensor, state_mask: Tensor, state: Tensor) -> Tensor:
        """Tokens [B, S], embedded images [B, N, width], which token is the state, and its token [B, 1, width]."""
        words = self.embed_with_images(tokens, images)
        return torch.where(state_mask[..., None], state.to(words.dtype), words)

    def embed_state(self, state: Tensor, real: Tensor) -> Tensor:
        with self.exact(state):
            return self.action_preprocessor.embed_state(state, real)

    def context(self, prefix: Tensor, tokens: Tensor, mask: Tensor) -> ChunkContext:
        """An embedded prompt [B, P, width]; tokens and mask [B, P + H] also cover the actions."""
        rope = self.model.rope(self.positions(tokens, mask))
        return ChunkContext(prefix, rope, action_mask(mask, tokens.shape[1] - prefix.shape[1]))

    def read(self, prompt: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Hidden states [B, S, width] of an embedded prompt, or of a prompt and its answer; tokens and mask [B, S]."""
        rope = self.model.rope(self.positions(tokens, mask))
        return self.model(prompt, rope, causal_mask(mask))

    def begin_answer(self, prompt: Tensor, tokens: Tensor, mask: Tensor, most: int) -> DecodeState:
        """What is written next follows an embedded prompt [B, P, width]; `most`: the longest answer."""
        positions = self.positions(tokens, mask)
        earlier = slice(tokens.shape[1] - 1)  # the last token of the prompt is the first that is decoded
        rope = self.model.rope(positions).slice(earlier)
        prefix = self.model.prefill(prompt[:, earlier], rope, causal_mask(mask[:, earlier]))
        last = tokens[:, -1].clone(), positions[..., -1:].clone()
        return DecodeState.begin(prefix, mask[:, earlier], *last, most)

    def prefill(self, context: ChunkContext) -> ChunkContext:
        """The context as several integration steps use it."""
        assert isinstance(context.prefix, Tensor)
        length = context.prefix.shape[1]
        rope, mask = context.rope.slice(slice(length)), context.mask[:, :, :length, :length]
        return context._replace(prefix=self.model.prefill(context.prefix, rope, mask))

    def velocity(
        self,
        noisy_actions: Tensor,
        time: Tensor,
        context: ChunkContext,
        real: Tensor,
        rounds: bool = False,
    ) -> Tensor:
        """Noisy actions [B, H, A] at a time [B] -> their velocity [B, H, A].

        `real`: which values are not padding. `rounds`: round hidden states to the type of the decoder's weights.
        """
        prefix, steps = context.prefix, noisy_actions.shape[1]
        with self.exact(noisy_actions):
            suffix = self.action_preprocessor.embed_actions(noisy_actions, real, time)
        suffix = suffix.to(self.model.dtype)
        if isinstance(prefix, Tensor):
            sequence = torch.cat((prefix, suffix), 1)
            hidden = self.model.hidden(sequence, context.rope, context.mask, actions=steps)[:, -steps:]
        else:
            rope = context.rope.slice(slice(-steps, None))
            hidden = self.model.hidden(suffix, rope, context.mask[:, :, -steps:], prefix, steps)
        hidden = hidden.to(self.model.dtype) if rounds else hidden
        back = self.action_preprocessor.action_proj_back
        with self.exact(hidden):
            return back(hidden.to(back.weight.dtype)).to(noisy_actions.dtype)

    def exact(self, x: Tensor) -> AbstractContextManager:
        """A context for the layers around the decoder: in float32, if their weights are."""
        if self.action_preprocessor.w1.weight.dtype == torch.float32:
            return torch.autocast(x.device.type, enabled=False)
        return nullcontext()


def action_mask(valid: Tensor, actions: int) -> Tensor:
    """[B, 1, S, S]: the last tokens, which stand for actions, also attend to later ones of each other."""
    mask = causal_mask(valid).clone()
    if actions:
        mask[..., -actions:, -actions:] |= valid[:, None, None, -actions:]
    return mask
