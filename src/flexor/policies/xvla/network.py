"""X-VLA's network: Florence-2, and the transformer that denoises actions. Parameter names are LeRobot's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from flexor.policies.vlm.cameras import CameraImages
from flexor.policies.vlm.florence import Florence
from flexor.policies.xvla.action_spaces import ActionLayout
from flexor.policies.xvla.config import XVLAConfig
from flexor.policies.xvla.transformer import ActionContext, SoftPromptedSize, SoftPromptedTransformer


class PreparedObservation(NamedTuple):
    """An observation, prepared for the network."""

    cameras: CameraImages
    tokens: Tensor  # of the task, [B, L]
    state: Tensor  # [B, state width]
    domain: Tensor  # [B]


class XVLANetwork(nn.Module):
    def __init__(self, config: XVLAConfig):
        super().__init__()
        self.config = config
        self.views = config.views
        florence = config.florence_size()
        self.vlm = Florence(florence)
        self.transformer = SoftPromptedTransformer(
            SoftPromptedSize(
                width=config.hidden_size,
                depth=config.depth,
                heads=config.num_heads,
                mlp_ratio=config.mlp_ratio,
                domains=config.num_domains,
                action=config.action_space.width,
                state=config.state_width,
                time=config.dim_time,
                prompts=config.len_soft_prompts,
                positions=config.max_len_seq,
                features=florence.text.width,
                hetero=config.use_hetero_proj,
                dropout=config.dropout,
            )
        )
        self.layout = ActionLayout(config.action_space, config.state_width)
        self._freeze()

    def _freeze(self) -> None:
        config, vlm = self.config, self.vlm
        vlm.vision_tower.requires_grad_(not config.freeze_vision_encoder)
        vlm.language_model.requires_grad_(not config.freeze_language_encoder)
        for name, parameter in self.transformer.named_parameters():
            is_prompt = "soft_prompt" in name
            parameter.requires_grad_(
                config.train_soft_prompts if is_prompt else config.train_policy_transformer
            )

    @property
    def dtype(self) -> torch.dtype:
        return self.transformer.pos_emb.dtype

    def blocks(self) -> list[nn.Module]:
        return [*self.vlm.blocks(), *self.transformer.blocks]

    def context(self, observation: PreparedObservation) -> ActionContext:
        """What actions attend to.

        Florence-2 reads the words together with the first image only; further images go to the transformer as they
        are. A view that is missing has tokens of zeros, also where only some samples lack it.
        """
        views = self._view_tokens(observation.cameras)  # [B, views, T, features]
        words = self.vlm.embed_tokens(observation.tokens).to(views.dtype)
        encoded = self.vlm.encode(torch.cat((views[:, 0], words), 1))
        state = self.layout.hide_state(observation.state.to(self.dtype))
        further = views[:, 1:].flatten(1, 2)
        return self.transformer.context(encoded, further, state, observation.domain, self.config.chunk_size)

    def _view_tokens(self, cameras: CameraImages) -> Tensor:
        images = cameras.stacked()  # [B, N, ...]
        batch, count = images.shape[:2]
        embed = self.vlm.embed_features if cameras.encoded else self.vlm.embed_images
        tokens = embed(images.flatten(0, 1)).unflatten(0, (batch, count))
        masks = cameras.stacked_masks()
        if masks is not None:
            tokens = tokens.masked_fill(~masks[:, :, None, None], 0.0)
        missing = max(0, self.views - count)
        return (
            torch.cat((tokens, tokens.new_zeros(batch, missing, *tokens.shape[2:])), 1) if missing else tokens
        )

    def actions(self, noisy: Tensor, time: Tensor, context: ActionContext) -> Tensor:
        """Noisy actions [B, H, width] at times [B], from 0 for actions to 1 for noise -> actions [B, H, width]."""
        return self.transformer(self.layout.hide_action(noisy), time, context)
