"""EO-1 (Qu et al. 2025, https://arxiv.org/abs/2508.21112): a vision-language model that denoises actions itself.

Qwen2.5-VL reads camera images, the robot's state and the task as a conversation, whose answer is a chunk of noisy
actions: a token each in the same sequence. Their last hidden states become the velocity that turns noise into actions
(flow matching). Attention is causal, so the conversation is read once for all integration steps.

Parameter names and settings are LeRobot's, so either program can load the other's checkpoints.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from flexor.core.batch import ACTION, STATE, Batch
from flexor.core.errors import ConfigError, FlexorError
from flexor.core.log import log
from flexor.core.rng import NoiseSource
from flexor.policies.base import Loss, Policy, action_padding, mean_over_valid, without_padding
from flexor.policies.eo1.config import EO1Config
from flexor.policies.eo1.conversation import PROMPT, PROMPT_MASK, STATE_MASK
from flexor.policies.eo1.network import EO1Network, SequenceContext
from flexor.policies.nn.flow import FlowToNoise
from flexor.policies.nn.real_time import prefix_guidance
from flexor.policies.nn.recompute import recompute
from flexor.policies.nn.resize import padded
from flexor.policies.vlm.qwen2_5_files import load_weights


class EO1(Policy):
    Config = EO1Config
    config: EO1Config
    continues_chunks = True
    optimizes_frozen = True

    def __init__(self, config: EO1Config):
        super().__init__(config)
        self.model = EO1Network(config)
        self.flow = FlowToNoise(
            config.num_denoise_steps,
            (config.time_sampling_beta_alpha, config.time_sampling_beta_beta),
            config.time_sampling_scale,
            config.time_sampling_offset,
        )
        if config.gradient_checkpointing:
            for block in self.shard_units():
                recompute(block)

    def loss(self, batch: Batch, noise: NoiseSource) -> Loss:
        config, is_pad = self.config, action_padding(batch)
        mask = batch[PROMPT_MASK]
        if not config.supervise_padding_actions:
            mask = mask.clone()
            mask[:, -config.chunk_size :] &= ~is_pad
        velocity = partial(self.model.velocity, context=self._read(batch, mask))
        error = self.flow.error(velocity, padded(batch[ACTION], config.max_action_dim), noise)
        if not config.supervise_padding_action_dims:
            error = without_padding(error[..., : batch[ACTION].shape[-1]], batch)
        if config.supervise_padding_actions:
            return Loss(error.mean((1, 2)), {})
        return Loss(mean_over_valid(error, is_pad, batch), {})

    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        config, state = self.config, batch[STATE]
        context = self.model.prefill(self._read(batch, batch[PROMPT_MASK]))
        shape = (len(state), config.chunk_size, config.max_action_dim)
        guidance = prefix_guidance(batch, config.rtc_config, *shape[1:])
        velocity = partial(self.model.velocity, context=context)
        chunk = self.flow.sample(velocity, shape, noise, state, guidance)
        return chunk[..., : config.action.shape[0]]

    def _read(self, batch: Batch, mask: Tensor) -> SequenceContext:
        config = self.config
        images = []
        for camera, size in zip(config.images, config.image_sizes):
            if camera not in batch:
                raise FlexorError(
                    f"EO-1 was trained on {', '.join(config.images)}, but {camera} is missing in the observation."
                )
            if batch[camera].shape[-2:] != size:
                height, width = batch[camera].shape[-2:]
                raise FlexorError(
                    f"{camera} has {height} x {width} pixels, but this EO-1 takes {size[0]} x {size[1]} of it."
                )
            images.append(batch[camera])
        state = padded(batch[STATE], config.max_state_dim)
        return self.model.read(images, batch[PROMPT], mask, batch[STATE_MASK], state)

    def load_backbone(self) -> None:
        config = self.config
        if not config.load_vlm_weights:
            log.warning(
                "policy.load_vlm_weights=false: the vision-language model is random: it was never trained on images "
                "and text"
            )
            return
        try:
            load_weights(config.vlm_files, self.model.vlm_backbone)
        except ConfigError as error:
            raise ConfigError(
                f"A new EO-1 starts from the weights of a vision-language model, which can't be loaded: {error} Put "
                "its config.json, model.safetensors, tokenizer.json and tokenizer_config.json into a folder and name "
                "it with --policy.vlm_base=FOLDER, or start from a trained policy with --policy.path. To train on a "
                "random vision-language model instead, set --policy.load_vlm_weights=false."
            ) from error

    @property
    def needs_autocast(self) -> bool:
        return self.model.vlm_backbone.decoder.dtype != torch.bfloat16

    def shard_units(self) -> list[nn.Module]:
        return self.model.blocks()
