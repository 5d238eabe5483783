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
from flexor.policies.nn.transformer import TransformerSize
from flexor.policies.smolvla.config import SmolVLAConfig
from flexor.policies.smolvla.expert import ActionExpert, Chunk, ReusedPrefix, layers_apart, place_chunk
from flexor.policies.smolvla.vlm import SmolVLM, freeze_vlm
from flexor.policies.smolvla.vlm_size import read_size


class Observed(NamedTuple):
    """An observation, prepared for the network."""

    images: list[Tensor]  # [B, 3, H, W] of each camera that is there, in -1..1
    masks: list[Tensor | None]  # [B] of each camera: False where a sample has no image; None: all have one
    placeholders: int  # of cameras that are missing
    words: Tensor  # [B, L]
    word_mask: Tensor  # [B, L], False for padding
    state: Tensor  # [B, max_state_dim]


class Context(NamedTuple):
    """What the language model made of an observation, for the expert. Computed once."""

    prefix: Sequence[KVCache | ReusedPrefix]  # of each layer of the expert
    chunk: Chunk


class VlmWithExpert(nn.Module):
    """The two networks, under LeRobot's names."""

    def __init__(self, vlm: SmolVLM, expert: ActionExpert):
        super().__init__()
        self.vlm = vlm
        self.lm_expert = expert


class SmolVLANetwork(nn.Module):
    image_edges: Tensor | None

    def __init__(self, config: SmolVLAConfig):
        super().__init__()
        self.config = config
        whole = read_size(config.vlm_model_name).with_depth(config.num_vlm_layers)
        cross = "cross" in config.attention_mode
        every = config.self_attn_every_n_layers
        depth, self.apart = layers_apart(whole.text.depth, config.num_expert_layers, cross, every)
        self.used = (depth - 1) * self.apart + 1  # layers of the language model that have an effect
        self.text: TransformerSize = whole.text
        narrow = replace(whole.text.scaled(config.expert_width_multiplier), depth=depth)
        if narrow.width % 2:  # half of the time's embedding are sines, half cosines
            raise ConfigError(
                f"policy.expert_width_multiplier={config.expert_width_multiplier} makes an expert of width "
                f"{narrow.width}, which must be even."
            )
        vlm = SmolVLM(whole, config.image_side)
        freeze_vlm(vlm, self.used, vision=config.freeze_vision_encoder, everything=config.train_expert_only)
        expert = ActionExpert(narrow, whole.text.kv_width, cross, every)
        self.vlm_with_expert = VlmWithExpert(vlm, expert)
        self.state_proj = nn.Linear(config.max_state_dim, whole.text.width)
        self.state_proj.requires_grad_(config.train_state_proj)
        self.action_in_proj = nn.Linear(config.max_action_dim, narrow.width)
        self.action_out_proj = nn.Linear(narrow.width, config.max_action_dim)
        self.action_time_mlp_in = nn.Linear(2 * narrow.width, narrow.width)
        self.action_time_mlp_out = nn.Linear(narrow.width, narrow.width)
        edges = _image_edges(config.vlm_model_name) if config.add_image_special_tokens else None
        self.register_buffer("image_edges", edges, persistent=False)

    def blocks(self) -> list[nn.Module]:
        return [*self.vlm_with_expert.vlm.layers(), *self.vlm_with_expert.lm_expert.layers]

    def read(self, observed: Observed, reused: bool = False) -> Context:
        """Images and words see each other; the state sees them and is not seen by them. `reused`: for several steps.

        With a frozen language model only the state needs gradients. It then goes through the model alone, so that
        nothing has to be kept of the many other tokens for the backward pass.
        """
        seen, valid = self._embed(observed)
        state = self.state_proj(observed.state)[:, None].to(seen.dtype)
        last = torch.ones_like(valid[:, :1])
        whole = torch.cat((valid, last), 1)
        language = self.vlm_with_expert.vlm.model.text_model
        rope = language.rope(whole.cumsum(1) - 1)
        if self.config.train_expert_only:
            before = language.prefill(
                seen, rope.slice(slice(None, -1)), valid[:, None, None], depth=self.used
            )
            after = language.prefill(
                state, rope.slice(slice(-1, None)), whole[:, None, None], before, self.used
            )
            layers = [early.append(late) for early, late in zip(before, after)]
        else:
            sees_state = torch.arange(whole.shape[1], device=whole.device) == valid.shape[1]
            attend = whole[:, None, None] & (sees_state[:, None] | ~sees_state)
            layers = language.prefill(torch.cat((seen, state), 1), rope, attend, depth=self.used)
        prefix = layers[:: self.apart]
        return Context(
            self.vlm_with_expert.lm_expert.reused(prefix) if reused else prefix,
            place_chunk(self.text, whole, self.config.chunk_size),
        )

    def velocity(self, x: Tensor, time: Tensor, context: Context) -> Tensor:
        """A noisy chunk [B, H, A] and its time [B] -> noise minus actions [B, H, A]."""
        actions = self.action_in_proj(x)
        embedded = time_embedding(time, actions.shape[-1], self.config.min_period, self.config.max_period)
        times = embedded.to(actions.dtype)[:, None].expand_as(actions)
        hidden = F.silu(self.action_time_mlp_in(torch.cat((actions, times), -1)))
        tokens = self.action_time_mlp_out(hidden).to(x.dtype)
        return self.action_out_proj(self.vlm_with_expert.lm_expert(tokens, context.chunk, context.prefix))

    def _embed(self, observed: Observed) -> tuple[Tensor, Tensor]:
        """Tokens of images and words [B, S, width], and which of them are not padding [B, S].

        Nobody attends to the images of missing cameras, so they have no tokens.
        """
        vlm, batch = self.vlm_with_expert.vlm, len(observed.words)
        words = vlm.read(observed.words).to(
            observed.state.dtype
        )  # autocast and bfloat16 weights would round sums
        images = vlm.see(torch.cat(observed.images)).unflatten(0, (-1, batch)).to(words.dtype)
        there = observed.word_mask.new_ones(batch, images.shape[2])
        parts, masks = [], []
        for tokens, mask in zip(images, observed.masks):
            parts.append(self._framed(tokens))
            shown = there if mask is None else mask.bool()[:, None] & there
            masks.append(shown if self.image_edges is None else F.pad(shown, (2, 1), value=True))
        for _ in range(observed.placeholders if self.image_edges is not None else 0):
            parts.append(self._framed(words[:, :0]))
            masks.append(there[:, :1].expand(-1, 3))
        tokens, valid = torch.cat((*parts, words), 1), torch.cat((*masks, observed.word_mask), 1)
        short = max(0, self.config.prefix_length - 1 - tokens.shape[1])  # the state comes last
        return F.pad(tokens, (0, 0, 0, short)), F.pad(valid, (0, short), value=False)

    def _framed(self, tokens: Tensor) -> Tensor:
        """Tokens of an image [B, T, width] with special tokens before and after them."""
        if self.image_edges is None:
            return tokens
        edges = self.vlm_with_expert.vlm.model.text_model.embed_tokens(self.image_edges)
        before, after = (edge.expand(len(tokens), -1, -1) for edge in (edges[:2], edges[2:]))
        return torch.cat((before, tokens, after), 1)


def _image_edges(name: str) -> Tensor:
    """The special tokens around an image: two before, one after."""
    tokenizer = fetch("AutoTokenizer", name)
    around = getattr(tokenizer, "fake_image_token", "<fake_token_around_image>")
    whole = getattr(tokenizer, "global_image_token", "<global-img>")
    ids = tokenizer.convert_tokens_to_ids([around, whole, around])
    return torch.tensor(ids, device="cpu")
