"""SmolVLA's network: the vision-language model, the action expert, and the projections that connect them to a robot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.core.errors import ConfigError
from flexor.policies.hf_transformers import fetch
from flexor.policies.nn.flow import time_embedding
from flexor.policies.nn.kv_cache import KVCache
from flexor.policies.nn.transformer import TransformerLayer, TransformerSize, round_in_bf16
from flexor.policies.smolvla.config import SmolVLAConfig
from flexor.policies.smolvla.expert import (
    ActionExpert,
    ChunkAttention,
    ReusedPrefix,
    chunk_attention,
    layer_stride,
)
from flexor.policies.vlm.backbone import prefix_positions
from flexor.policies.vlm.cameras import CameraImages
from flexor.policies.vlm.smolvlm import SmolVLM
from flexor.policies.vlm.smolvlm_size import read_size


class Observation(NamedTuple):
    """An observation, prepared for the network."""

    cameras: CameraImages
    placeholders: int  # of missing cameras
    tokens: Tensor  # of the task, [B, L]
    token_mask: Tensor  # [B, L], False for padding
    state: Tensor  # [B, max_state_dim]


class Context(NamedTuple):
    """What the expert attends to. Computed once per observation."""

    prefix: Sequence[KVCache | ReusedPrefix]  # for each layer of the expert
    attention: ChunkAttention


class VlmWithExpert(nn.Module):
    """The two networks, under LeRobot's names."""

    def __init__(self, vlm: SmolVLM, expert: ActionExpert):
        super().__init__()
        self.vlm = vlm
        self.lm_expert = expert


class SmolVLANetwork(nn.Module):
    image_markers: Tensor | None
    """The special tokens around an image."""

    def __init__(self, config: SmolVLAConfig):
        super().__init__()
        self.config = config
        size = read_size(config.vlm_model_name).with_depth(config.num_vlm_layers)
        cross = "cross" in config.attention_mode
        every = config.self_attn_every_n_layers
        depth, self.stride = layer_stride(size.text.depth, config.num_expert_layers, cross, every)
        self.used_layers = (depth - 1) * self.stride + 1  # layers of the language model that have an effect
        self.text: TransformerSize = size.text
        expert_size = replace(size.text.scaled(config.expert_width_multiplier), depth=depth)
        width = expert_size.width
        if width % 2:  # half of the time's embedding are sines, half cosines
            raise ConfigError(
                f"policy.expert_width_multiplier={config.expert_width_multiplier} makes an expert of width "
                f"{width}, which must be even."
            )
        vlm = SmolVLM(size, config.image_side)
        freeze_vlm(
            vlm, self.used_layers, vision=config.freeze_vision_encoder, everything=config.train_expert_only
        )
        expert = ActionExpert(expert_size, size.text.kv_width, cross, every)
        self.vlm_with_expert = VlmWithExpert(vlm, expert)
        self.state_proj = nn.Linear(config.max_state_dim, size.text.width)
        self.state_proj.requires_grad_(config.train_state_proj)
        self.action_in_proj = nn.Linear(config.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, config.max_action_dim)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)
        markers = _image_markers(config.vlm_model_name) if config.add_image_special_tokens else None
        self.register_buffer("image_markers", markers, persistent=False)
        self.rounds_in_bf16 = False

    def round_in_bf16(self) -> None:
        """For weights in bfloat16 without autocast: round where LeRobot does."""
        self.vlm_with_expert.vlm.round_in_bf16()
        round_in_bf16(self.vlm_with_expert.lm_expert)
        self.rounds_in_bf16 = True

    def blocks(self) -> list[nn.Module]:
        return [*self.vlm_with_expert.vlm.blocks(), *self.vlm_with_expert.lm_expert.layers]

    def prefill(self, observation: Observation, reuse: bool = False) -> Context:
        """Computes the prefix; `reuse`: for several integration steps. Rows attend to columns, x is padding:

                        images and text    state
            images   |      1 1 x        |   0
            text     |      1 1 x        |   0
            state    |      1 1 x        |   1

        With a frozen language model only the state needs gradients. It then goes through the model separately, so that
        nothing of the other tokens is stored for the backward pass.
        """
        embeds, embeds_mask = self._embed(observation)
        state = self.state_proj(observation.state)[:, None].to(embeds.dtype)
        prefix_mask = torch.cat((embeds_mask, torch.ones_like(embeds_mask[:, :1])), 1)
        decoder = self.vlm_with_expert.vlm.decoder
        rope = decoder.rope(prefix_positions(prefix_mask))
        depth = self.used_layers
        if self.config.train_expert_only:
            early, late = rope.slice(slice(None, -1)), rope.slice(slice(-1, None))
            cache = decoder.prefill(embeds, early, embeds_mask[:, None, None], depth=depth)
            state_cache = decoder.prefill(state, late, prefix_mask[:, None, None], cache, depth)
            layers = [layer.append(state_layer) for layer, state_layer in zip(cache, state_cache)]
        else:
            is_state = torch.arange(prefix_mask.shape[1], device=prefix_mask.device) == embeds_mask.shape[1]
            mask = prefix_mask[:, None, None] & (is_state[:, None] | ~is_state)
            layers = decoder.prefill(torch.cat((embeds, state), 1), rope, mask, depth=depth)
        prefix = layers[:: self.stride]
        return Context(
            self.vlm_with_expert.lm_expert.reusable(prefix) if reuse else prefix,
            chunk_attention(self.text, prefix_mask, self.config.chunk_size),
        )

    def velocity(self, noisy_actions: Tensor, time: Tensor, context: Context) -> Tensor:
        """Noisy actions [B, H, A] at a time [B] -> noise minus actions [B, H, A]."""
        actions = self.action_in_proj(noisy_actions)
        width = actions.shape[-1]
        time_embeds = time_embedding(time, width, self.config.min_period, self.config.max_period)
        time_embeds = time_embeds.to(actions.dtype)[:, None].expand_as(actions)
        mixed = F.silu(self.action_time_mlp_in(torch.cat((actions, time_embeds), -1)))
        tokens = self.action_time_mlp_out(mixed).to(noisy_actions.dtype)
        hidden = self.vlm_with_expert.lm_expert(tokens, context.attention, context.prefix)
        return self.action_out_proj(hidden.float() if self.rounds_in_bf16 else hidden)

    def _embed(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Tokens of images and task [B, S, width], and which of them are not padding [B, S].

        Missing cameras have no tokens, as nothing would attend to them.
        """
        vlm, batch = self.vlm_with_expert.vlm, len(observation.tokens)
        # to the state's type: autocast and bfloat16 weights would round sums
        text_embeds = vlm.embed_tokens(observation.tokens).to(observation.state.dtype)
        cameras = observation.cameras
        embed_images = vlm.embed_features if cameras.encoded else vlm.embed_images
        image_embeds = embed_images(torch.cat(cameras.images)).unflatten(0, (-1, batch))
        image_embeds = image_embeds.to(text_embeds.dtype)  # [N, B, T, width]
        full = observation.token_mask.new_ones(batch, image_embeds.shape[2])
        embeds, masks = [], []
        for image, camera_mask in zip(image_embeds, cameras.masks):
            embeds.append(self._add_markers(image))
            mask = full if camera_mask is None else camera_mask.bool()[:, None] & full
            masks.append(mask if self.image_markers is None else F.pad(mask, (2, 1), value=True))
        for _ in range(observation.placeholders if self.image_markers is not None else 0):
            embeds.append(self._add_markers(text_embeds[:, :0]))
            masks.append(full[:, :1].expand(-1, 3))
        tokens, mask = torch.cat((*embeds, text_embeds), 1), torch.cat((*masks, observation.token_mask), 1)
        padding = max(0, self.config.prefix_length - 1 - tokens.shape[1])  # the state comes last
        return F.pad(tokens, (0, 0, 0, padding)), F.pad(mask, (0, padding), value=False)

    def _add_markers(self, tokens: Tensor) -> Tensor:
        """Tokens of an image [B, T, width] with special tokens around them."""
        if self.image_markers is None:
            return tokens
        markers = self.vlm_with_expert.vlm.decoder.embed_tokens(self.image_markers)
        start, end = (part.expand(len(tokens), -1, -1) for part in (markers[:2], markers[2:]))
        return torch.cat((start, tokens, end), 1)


def _image_markers(name: str) -> Tensor:
    """The special tokens around an image: two before, one after."""
    tokenizer = fetch("AutoTokenizer", name)
    edge = getattr(tokenizer, "fake_image_token", "<fake_token_around_image>")
    global_image = getattr(tokenizer, "global_image_token", "<global-img>")
    return torch.tensor(tokenizer.convert_tokens_to_ids([edge, global_image, edge]), device="cpu")


def freeze_vlm(vlm: SmolVLM, used_layers: int, *, vision: bool, everything: bool) -> None:
    """Freeze what the settings say, what LeRobot never trains, and what the loss does not reach.

    `used_layers` of the language model have an effect, the last one only through its keys and values.
    """
    if vision:
        vlm.model.vision_model.requires_grad_(False)
    if everything:
        vlm.requires_grad_(False)
        return
    text = vlm.model.text_model
    vlm.lm_head.requires_grad_(False)
    text.norm.requires_grad_(False)
    depth = len(text.layers)
    for number in range(depth):
        layer = text.layers[number]
        assert isinstance(layer, TransformerLayer)
        if number >= used_layers or number == depth - 1 or (used_layers != depth and number == depth - 2):
            layer.requires_grad_(False)
        elif number == used_layers - 1:
            for part in (layer.mlp, layer.post_attention_layernorm, layer.self_attn.q_proj):
                part.requires_grad_(False)
            layer.self_attn.o_proj.requires_grad_(False)
