"""SmolVLA (Shukor et al. 2025, https://arxiv.org/abs/2506.01844): a vision-language model and an action expert.

SmolVLM2 reads the camera images, the task and the robot's state, in this order. An expert beside it turns noise into an
action chunk by flow matching; it attends to what SmolVLM2 made of the observation. SmolVLM2 never sees the actions, so
it runs once, also for all integration steps of a chunk.

Parameter names and settings are LeRobot's, so either program can load the other's checkpoints.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from flexor.core.batch import ACTION, STATE, Batch
from flexor.core.errors import ConfigError, FlexorError
from flexor.core.log import log
from flexor.core.rng import NoiseSource
from flexor.policies.adapters import is_adapter
from flexor.policies.base import Loss, ParamGroup, Policy, action_padding, mean_over_valid, without_padding
from flexor.policies.nn.flow import FlowToNoise
from flexor.policies.nn.real_time import held_in
from flexor.policies.nn.resize import padded, resize_with_padding
from flexor.policies.processing.tokenize import TASK_MASK, TASK_TOKENS
from flexor.policies.smolvla.config import SmolVLAConfig
from flexor.policies.smolvla.network import Observed, SmolVLANetwork
from flexor.policies.smolvla.vlm_files import load_vlm


class SmolVLA(Policy):
    Config = SmolVLAConfig
    config: SmolVLAConfig
    continues_chunks = True

    def __init__(self, config: SmolVLAConfig):
        super().__init__(config)
        self.model = SmolVLANetwork(config)
        self.flow = FlowToNoise(config.num_steps)

    def loss(self, batch: Batch, noise: NoiseSource) -> Loss:
        actions = padded(batch[ACTION], self.config.max_action_dim)
        context = self.model.read(self._observe(batch))
        error = self.flow.error(partial(self.model.velocity, context=context), actions, noise)
        error = without_padding(error[..., : self.config.action.shape[0]], batch)
        return Loss(mean_over_valid(error, action_padding(batch), batch), {})

    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        state = batch[STATE]
        context = self.model.read(self._observe(batch), reused=True)
        shape = (len(state), self.config.chunk_size, self.config.max_action_dim)
        held = held_in(batch, self.config.rtc_config, *shape[1:])
        chunk = self.flow.sample(partial(self.model.velocity, context=context), shape, noise, state, held)
        return chunk[..., : self.config.action.shape[0]]

    def _observe(self, batch: Batch) -> Observed:
        """What the network reads: images [B, 3, H, W] in -1..1, and which of them are there."""
        config = self.config
        present = [camera for camera in config.cameras if camera in batch]
        if not present:
            raise FlexorError(
                f"The observation has no image: the policy needs at least one of {', '.join(config.cameras)}."
            )
        # as in LeRobot: a camera that is missing has a place only if empty_cameras keeps one
        placeholders = min(len(config.cameras) - len(present), config.empty_cameras)
        images = [self._fit(batch[camera]) for camera in present]
        masks = [batch.get(f"{camera}_padding_mask") for camera in present]
        state = padded(batch[STATE], config.max_state_dim)
        return Observed(images, masks, placeholders, batch[TASK_TOKENS], batch[TASK_MASK].bool(), state)

    def _fit(self, images: Tensor) -> Tensor:
        if self.config.resize_imgs_with_padding is not None:
            width, height = self.config.resize_imgs_with_padding
            images = resize_with_padding(images, height, width, "left-top")
        return images * 2 - 1

    def load_backbone(self) -> None:
        name = self.config.vlm_model_name
        if not self.config.load_vlm_weights:
            frozen = " and stays so (policy.train_expert_only)" if self.config.train_expert_only else ""
            log.warning(
                "policy.load_vlm_weights=false: the vision-language model is random%s, and knows nothing of images "
                "and words",
                frozen,
            )
            return
        weights = self.model.vlm_with_expert.vlm.state_dict()
        try:
            load_vlm(name, {each: weights[each] for each in weights if not is_adapter(each)})
        except ConfigError as error:
            raise ConfigError(
                f"A new SmolVLA starts from the weights of a vision-language model, which can't be loaded: {error} Put "
                "its config.json, model.safetensors, tokenizer.json and tokenizer_config.json into a folder and "
                "name it with --policy.vlm_model_name=FOLDER, or start from a trained policy with "
                "--policy.path=lerobot/smolvla_base. To train on a random vision-language model instead, set "
                "--policy.load_vlm_weights=false."
            ) from error

    def shard_units(self) -> list[nn.Module]:
        return self.model.blocks()

    def param_groups(self) -> list[ParamGroup]:
        # with what is frozen: LeRobot's optimizer numbers its parameters too
        return [ParamGroup(list(self.parameters()))]
