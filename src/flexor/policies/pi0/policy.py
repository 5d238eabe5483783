"""pi0 (Black et al. 2024, https://arxiv.org/abs/2410.24164) and pi0.5 (https://arxiv.org/abs/2504.16054).

PaliGemma computes a prefix of the images and the task. An action expert, a smaller Gemma, attends to its cache and
predicts how to move noise towards actions (flow matching). pi0 gives the expert the state as a token; pi0.5 writes it
into the prompt, and gives the expert the time through its norms.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from flexor.core.batch import ACTION, STATE, Batch
from flexor.core.rng import NoiseSource
from flexor.policies.base import Loss, Policy, without_padding
from flexor.policies.image_encoder import ImageEncoder
from flexor.policies.nn.flow import FlowToNoise
from flexor.policies.nn.real_time import prefix_guidance
from flexor.policies.nn.resize import padded
from flexor.policies.pi0.config import Pi0Config, Pi05Config, PiConfig
from flexor.policies.pi0.network import Pi0Network, Pi05Network, PiNetwork
from flexor.policies.vlm.paligemma_names import PI_NAMES
from flexor.policies.vlm.paligemma_policy import (
    apply_settings,
    encode_images,
    image_encoder,
    prefill_batch,
)


class PiPolicy(Policy):
    """What pi0 and pi0.5 share: only their networks and settings differ."""

    Network: ClassVar[type[PiNetwork]]
    config: PiConfig
    continues_chunks = True
    optimizes_frozen = True
    weight_names = PI_NAMES

    def __init__(self, config: PiConfig):
        super().__init__(config)
        self.model = self.Network(config)
        self.flow = FlowToNoise(
            config.num_inference_steps,
            (config.time_sampling_beta_alpha, config.time_sampling_beta_beta),
            config.time_sampling_scale,
            config.time_sampling_offset,
        )
        vlm = self.model.paligemma_with_expert.vlm
        if config.freeze_vision_encoder:
            vlm.vision_tower.requires_grad_(False)
        if config.train_expert_only:
            vlm.requires_grad_(False)
        apply_settings(config, self.model.paligemma_with_expert, self.shard_units())

    def loss(self, batch: Batch, noise: NoiseSource) -> Loss:
        actions = batch[ACTION]
        error = self.flow.error(self._velocity(batch), padded(actions, self.config.max_action_dim), noise)
        error = without_padding(error[..., : actions.shape[-1]], batch)
        return Loss(error.mean((1, 2)), {})  # as openpi: without a mask for padded steps

    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        state = batch[STATE]
        shape = (len(state), self.config.chunk_size, self.config.max_action_dim)
        guidance = prefix_guidance(batch, self.config.rtc_config, *shape[1:])
        chunk = self.flow.sample(self._velocity(batch), shape, noise, state, guidance)
        return chunk[..., : self.config.action.shape[0]]

    def _velocity(self, batch: Batch) -> Callable[[Tensor, Tensor], Tensor]:
        """A function of noisy actions and their time. The prefix is computed once, here."""
        prefix = prefill_batch(self.model.paligemma_with_expert.vlm, self.config, batch)
        state = padded(batch[STATE], self.config.max_state_dim)
        return partial(self.model.velocity, prefix=prefix, state=state)

    def image_encoder(self) -> ImageEncoder:
        return image_encoder(self.model.paligemma_with_expert.vlm, self.config)

    def encode_images(self, images: Tensor, camera: str) -> Tensor:
        return encode_images(self.model.paligemma_with_expert.vlm, self.config, images)

    def shard_units(self) -> list[nn.Module]:
        return self.model.paligemma_with_expert.blocks()


class Pi0(PiPolicy):
    Config = Pi0Config
    Network = Pi0Network


class Pi05(PiPolicy):
    Config = Pi05Config
    Network = Pi05Network
