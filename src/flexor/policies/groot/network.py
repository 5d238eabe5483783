"""GR00T's network: a Qwen3-VL without its last layers, and the action head that attends to its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flexor.policies.groot.dit import DiT, KeysAndValues, SelfAttentionStack, TokenMemory
from flexor.policies.groot.embodiment import ActionTokens, EmbodimentMLP
from flexor.policies.groot.size import GrootSize
from flexor.policies.vlm.qwen2_5_images import ImageGrid
from flexor.policies.vlm.qwen3_vl import Qwen3VL


class ObservationContext(NamedTuple):
    """What actions attend to, and the robot they are for."""

    state: Tensor
    """A token [B, 1, width]."""
    memories: list[TokenMemory]
    """Words, images, and both."""
    embodiment: Tensor
    """[1]"""
    remembered: list[KeysAndValues | None] | None = None
    """When the policy acts: what each block makes of the memories."""


class Backbone(nn.Module):
    """Exists for the names of its weights."""

    def __init__(self, size: GrootSize, grids: Sequence[ImageGrid]):
        super().__init__()
        self.model = Qwen3VL(size.backbone, grids)


class ActionHead(nn.Module):
    def __init__(self, size: GrootSize):
        super().__init__()
        self.size = size
        width, robots = size.dit.blocks.width, size.embodiments
        self.model = DiT(size.dit)
        self.state_encoder = EmbodimentMLP(robots, size.state, size.hidden, width)
        self.action_encoder = ActionTokens(robots, size.action, width)
        self.action_decoder = EmbodimentMLP(robots, size.hidden, size.hidden, size.action)
        self.vlln: nn.Module = nn.LayerNorm(size.dit.memory) if size.normalizes_tokens else nn.Identity()
        if size.vl is not None:
            self.vl_self_attention = SelfAttentionStack(size.vl)
        if size.positions is not None:
            self.position_embedding = nn.Embedding(size.positions, width)
            # without a base model: large enough to tell actions apart from the first step on
            nn.init.normal_(self.position_embedding.weight, std=0.5)

    def projectors(self) -> list[nn.Module]:
        """What turns states and actions into tokens, and tokens into actions."""
        positions = [self.position_embedding] if self.size.positions is not None else []
        return [self.state_encoder, self.action_encoder, self.action_decoder, *positions]

    def token_layers(self) -> list[nn.Module]:
        """What the backbone's tokens go through."""
        return [self.vlln, *([] if self.size.vl is None else [self.vl_self_attention])]

    def read_tokens(self, hidden: Tensor, valid: Tensor) -> Tensor:
        """Hidden states [B, S, D] of the backbone -> the same shape. Nothing attends to padding."""
        tokens = self.vlln(hidden)
        return tokens if self.size.vl is None else self.vl_self_attention(tokens, valid[:, None, None])

    def velocity(self, noisy_actions: Tensor, time: Tensor, context: ObservationContext) -> Tensor:
        """Noisy actions [B, H, A] at times [B], which are numbers of buckets -> their velocity [B, H, A]."""
        steps, robot = noisy_actions.shape[1], context.embodiment
        tokens = self.action_encoder(noisy_actions, time, robot)
        if self.size.positions is not None:
            tokens = tokens + self.position_embedding.weight[:steps]
        sequence = torch.cat((context.state.to(tokens.dtype), tokens), 1)
        output = self.model(sequence, time, context.memories, context.remembered)
        return self.action_decoder(output[:, -steps:], robot).to(noisy_actions.dtype)


class GrootNetwork(nn.Module):
    def __init__(self, size: GrootSize, grids: Sequence[ImageGrid]):
        super().__init__()
        self.size = size
        self.backbone = Backbone(size, grids)
        self.action_head = ActionHead(size)

    @property
    def vlm(self) -> Qwen3VL:
        return self.backbone.model

    def freeze(self, tuned: TunedParts) -> None:
        """Train only some parts."""
        vlm, head = self.vlm, self.action_head
        self.requires_grad_(True)
        if not tuned.language:
            vlm.language_model.requires_grad_(False)
        for layer in vlm.language_model.layers[len(vlm.language_model.layers) - tuned.top_layers :]:
            layer.requires_grad_(True)
        if not tuned.vision:
            vlm.model.visual.requires_grad_(False)
        for part in [] if tuned.projectors else head.projectors():
            part.requires_grad_(False)
        if not tuned.dit:
            head.model.requires_grad_(False)
        for part in [] if tuned.token_layers else head.token_layers():
            part.requires_grad_(False)
        vlm.freeze_unused()

    def context(
        self, hidden: Tensor, token_ids: Tensor, valid: Tensor, state: Tensor, embodiment: Tensor
    ) -> ObservationContext:
        """Hidden states of the backbone [B, S, D] and its tokens [B, S], state [B, 1, width]."""
        tokens = self.action_head.read_tokens(hidden, valid)
        places = self.vlm.places(token_ids)
        mask = valid[:, None, None]
        words = TokenMemory(tokens.index_select(1, places.rest), mask.index_select(3, places.rest))
        images = TokenMemory(tokens.index_select(1, places.images), None)
        return ObservationContext(state, [words, images, TokenMemory(tokens, mask)], embodiment)

    def remember(self, context: ObservationContext) -> ObservationContext:
        """The context as several integration steps use it."""
        return context._replace(remembered=self.action_head.model.remember(context.memories))

    def blocks(self) -> list[nn.Module]:
        head = self.action_head
        vl = [] if head.size.vl is None else list(head.vl_self_attention.transformer_blocks)
        return [*self.vlm.blocks(), *vl, *head.model.transformer_blocks]


class TunedParts(NamedTuple):
    """Which parts are trained."""

    language: bool
    vision: bool
    projectors: bool
    dit: bool
    token_layers: bool
    top_layers: int = 0
    """Of the language model, if the whole is not trained."""
