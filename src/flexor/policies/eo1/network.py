"""EO-1's network: Qwen2.5-VL, whose sequence also holds the state and a noisy chunk, and the layers around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.core.errors import ConfigError
from flexor.policies.eo1.config import EO1Config
from flexor.policies.nn.flow import time_embedding
from flexor.policies.nn.kv_cache import KVCache
from flexor.policies.nn.rope import Rope
from flexor.policies.vlm.qwen2_5_images import QwenImages
from flexor.policies.vlm.qwen2_5_vl import QwenVL, causal_mask

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": nn.Identity,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_pytorch_tanh": partial(nn.GELU, "tanh"),
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "mish": nn.Mish,
}


class SequenceContext(NamedTuple):
    """An observation, to which a chunk of actions attends."""

    prefix: Tensor | list[KVCache]
    """Embedded [B, P, width]; when the policy acts, the keys and values of every layer."""
    rope: Rope
    """Of the prefix and the actions."""
    mask: Tensor
    """[B, 1, P + H, P + H]."""


class EO1Network(nn.Module):
    def __init__(self, config: EO1Config):
        super().__init__()
        self.config = config
        size = config.vlm_size()
        width = size.text.width
        if width % 2:  # half of the time's embedding are sines, half cosines
            raise ConfigError(
                f"policy.vlm_base={config.vlm_base} has hidden_size={width}, which must be even."
            )
        self.vlm_backbone = QwenVL(size, config.grids)
        if not size.tied:  # predicts words, which nothing asks for
            self.vlm_backbone.lm_head.requires_grad_(False)
        self.vlm_backbone.to(config.vlm_dtype)
        self.state_proj = nn.Linear(config.max_state_dim, width)
        self.action_in_proj = nn.Linear(config.max_action_dim, width)
        self.action_out_proj = projector(
            width, config.max_action_dim, config.num_action_layers, config.action_act
        )
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)
        self.prepare_images = QwenImages(config.image_sizes, config.grids)

    def read(
        self, images: Sequence[Tensor], tokens: Tensor, mask: Tensor, state_mask: Tensor, state: Tensor
    ) -> SequenceContext:
        """Images [B, 3, H, W] of each camera, tokens and masks [B, P + H], state [B, max_state_dim]."""
        vlm, length = self.vlm_backbone, tokens.shape[1] - self.config.chunk_size
        patches = self.prepare_images(images).to(vlm.decoder.dtype)
        words = vlm.embed(tokens[:, :length], patches)
        with self.float32(words):
            state_embeds = self.state_proj(state)[:, None]
        prefix = torch.where(state_mask[:, :length, None], state_embeds.to(words.dtype), words)
        rope = vlm.decoder.rope(vlm.positions(tokens, mask))
        return SequenceContext(prefix, rope, causal_mask(mask))

    def prefill(self, context: SequenceContext) -> SequenceContext:
        """The context as several integration steps use it."""
        assert isinstance(context.prefix, Tensor)
        length = context.prefix.shape[1]
        rope, mask = context.rope.slice(slice(length)), context.mask[:, :, :length, :length]
        return context._replace(prefix=self.vlm_backbone.decoder.prefill(context.prefix, rope, mask))

    def velocity(self, noisy_actions: Tensor, time: Tensor, context: SequenceContext) -> Tensor:
        """Noisy actions [B, H, A] at a time [B] -> their velocity [B, H, A]."""
        decoder, prefix = self.vlm_backbone.decoder, context.prefix
        suffix, steps = self.embed_actions(noisy_actions, time).to(decoder.dtype), noisy_actions.shape[1]
        if isinstance(prefix, Tensor):
            sequence = torch.cat((prefix, suffix), 1)
            hidden = decoder(sequence, context.rope, context.mask)[:, -steps:]
        else:
            rope = context.rope.slice(slice(-steps, None))
            hidden = decoder(suffix, rope, context.mask[:, :, -steps:], prefix)
        with self.float32(hidden):
            actions = self.action_out_proj(hidden.to(self.state_proj.weight.dtype))
        return actions.to(noisy_actions.dtype)

    def embed_actions(self, noisy_actions: Tensor, time: Tensor) -> Tensor:
        """[B, H, width]."""
        with self.float32(noisy_actions):
            actions = self.action_in_proj(noisy_actions)
            width = actions.shape[-1]
            times = time_embedding(time, width, self.config.min_period, self.config.max_period)
            both = torch.cat((actions, times[:, None].expand_as(actions).to(actions.dtype)), -1)
            return self.action_time_mlp_out(F.silu(self.action_time_mlp_in(both)))

    def float32(self, x: Tensor) -> AbstractContextManager:
        """A context for the layers around the language model: in float32, if their weights are."""
        if self.config.force_fp32_autocast and self.state_proj.weight.dtype == torch.float32:
            return torch.autocast(x.device.type, enabled=False)
        return nullcontext()

    def blocks(self) -> list[nn.Module]:
        return self.vlm_backbone.blocks()


def projector(width: int, output: int, layers: int, activation: str) -> nn.Sequential:
    """Linear layers with an activation between them; only the last one changes the width."""
    parts: list[nn.Module] = []
    for _ in range(layers - 1):
        parts += [nn.Linear(width, width), LAYERS[activation]()]
    return nn.Sequential(*parts, nn.Linear(width, output))
