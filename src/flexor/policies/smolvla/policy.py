"""SmolVLA (Shukor et al. 2025, https://arxiv.org/abs/2506.01844): a vision-language model and an action expert.

SmolVLM2 prefills a cache with the camera images, the task and the robot's state, in this order. An action expert beside
it attends to this prefix and turns noise into actions by flow matching. The prefix never attends to the actions, so it
is computed once for all integration steps of a chunk.

Parameter names and settings are LeRobot's, so either program can load the other's checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from flexor.core.batch import ACTION, STATE, Batch
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.rng import NoiseSource
from flexor.core.weight_files import load_tensors
from flexor.policies.adapters import is_adapter
from flexor.policies.base import Loss, Policy, action_padding, mean_over_valid, without_padding
from flexor.policies.image_encoder import ImageEncoder, for_linear_layer
from flexor.policies.nn.flow import FlowToNoise
from flexor.policies.nn.real_time import prefix_guidance
from flexor.policies.nn.resize import padded
from flexor.policies.processing.tokenize import TASK_MASK, TASK_TOKENS
from flexor.policies.smolvla.config import SmolVLAConfig
from flexor.policies.smolvla.network import Observation, SmolVLANetwork
from flexor.policies.vlm.cameras import prepare_cameras, prepare_images
from flexor.policies.vlm.smolvlm_size import smolvlm_files


class SmolVLA(Policy):
    Config = SmolVLAConfig
    config: SmolVLAConfig
    continues_chunks = True
    optimizes_frozen = True

    def __init__(self, config: SmolVLAConfig):
        super().__init__(config)
        self.model = SmolVLANetwork(config)
        self.flow = FlowToNoise(config.num_steps)

    def loss(self, batch: Batch, noise: NoiseSource) -> Loss:
        actions = padded(batch[ACTION], self.config.max_action_dim)
        context = self.model.prefill(self._prepare(batch))
        error = self.flow.error(partial(self.model.velocity, context=context), actions, noise)
        error = without_padding(error[..., : self.config.action.shape[0]], batch)
        return Loss(mean_over_valid(error, action_padding(batch), batch), {})

    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        state = batch[STATE]
        context = self.model.prefill(self._prepare(batch), reuse=True)
        shape = (len(state), self.config.chunk_size, self.config.max_action_dim)
        guidance = prefix_guidance(batch, self.config.rtc_config, *shape[1:])
        chunk = self.flow.sample(partial(self.model.velocity, context=context), shape, noise, state, guidance)
        return chunk[..., : self.config.action.shape[0]]

    def image_encoder(self) -> ImageEncoder:
        settings = {"size": self._image_size, "rounds_in_bf16": self.model.rounds_in_bf16}
        return ImageEncoder(self.model.vlm_with_expert.vlm.image_encoder(), settings)

    def encode_images(self, images: Tensor, camera: str) -> Tensor:
        prepared = prepare_images(images, self._image_size, "left-top")
        return for_linear_layer(self.model.vlm_with_expert.vlm.encode_images(prepared))

    @property
    def _image_size(self) -> tuple[int, int] | None:
        """Height and width."""
        resize = self.config.resize_imgs_with_padding
        return None if resize is None else (resize[1], resize[0])

    def _prepare(self, batch: Batch) -> Observation:
        config = self.config
        cameras = prepare_cameras(config.type, config.cameras, batch, self._image_size, "left-top")
        # as in LeRobot: a camera that is missing has a place only if empty_cameras keeps one
        placeholders = min(len(config.cameras) - len(cameras.images), config.empty_cameras)
        state = padded(batch[STATE], config.max_state_dim)
        return Observation(cameras, placeholders, batch[TASK_TOKENS], batch[TASK_MASK].bool(), state)

    def load_backbone(self) -> None:
        name = self.config.vlm_model_name
        if not self.config.load_vlm_weights:
            frozen = " and stays so (policy.train_expert_only)" if self.config.train_expert_only else ""
            log.warning(
                "policy.load_vlm_weights=false: the vision-language model is random%s: it was never trained on "
                "images and text",
                frozen,
            )
            return
        weights = self.model.vlm_with_expert.vlm.state_dict()
        try:
            load_tensors(
                smolvlm_files(name), {weight: weights[weight] for weight in weights if not is_adapter(weight)}
            )
        except ConfigError as error:
            raise ConfigError(
                f"A new SmolVLA starts from the weights of a vision-language model, which can't be loaded: {error} Put "
                "its config.json, model.safetensors, tokenizer.json and tokenizer_config.json into a folder and "
                "name it with --policy.vlm_model_name=FOLDER, or start from a trained policy with "
                "--policy.path=lerobot/smolvla_base. To train on a random vision-language model instead, set "
                "--policy.load_vlm_weights=false."
            ) from error

    def cast_to_act(self, stored: Mapping[str, torch.dtype]) -> None:
        super().cast_to_act(stored)
        if self.model.vlm_with_expert.vlm.decoder.dtype == torch.bfloat16:
            self.model.round_in_bf16()

    @property
    def needs_autocast(self) -> bool:
        return not self.model.rounds_in_bf16

    def shard_units(self) -> list[nn.Module]:
        return self.model.blocks()
