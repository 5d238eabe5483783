"""X-VLA (Zheng et al. 2025, https://arxiv.org/abs/2510.10274): one policy for robots of many kinds.

Florence-2 encodes the first camera's image and the task; further images go to the transformer directly. It predicts
clean actions from noisy ones. To sample, the prediction is mixed with less and less of the same noise, and predicted
again. Settings and weights are LeRobot's, so either program can load the other's checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.core.batch import ACTION, ACTION_LENGTH, BATCH_PLACE, STATE, Batch
from flexor.core.log import log
from flexor.core.rng import NoiseSource
from flexor.policies.base import Loss, ParamGroup, Policy
from flexor.policies.image_encoder import ImageEncoder
from flexor.policies.nn.real_time import GUIDANCE_WEIGHTS, PREVIOUS
from flexor.policies.nn.resize import padded
from flexor.policies.processing.tokenize import TASK_TOKENS
from flexor.policies.vlm.cameras import prepare_cameras, prepare_images
from flexor.policies.xvla.action_spaces import AUTO
from flexor.policies.xvla.config import XVLAConfig
from flexor.policies.xvla.names import XVLA_NAMES
from flexor.policies.xvla.network import PreparedObservation, XVLANetwork
from flexor.policies.xvla.processing import DOMAIN

LATEST = 1 - 1e-5  # of times, which are from 0 to below this
VLM_FACTOR = 0.1  # of the learning rate and weight decay of the vision-language model


class XVLA(Policy):
    Config = XVLAConfig
    config: XVLAConfig
    continues_chunks = True
    weight_names = XVLA_NAMES

    def __init__(self, config: XVLAConfig):
        super().__init__(config)
        self.model = XVLANetwork(config)

    def loss(self, batch: Batch, noise: NoiseSource) -> Loss:
        width = self.config.action_space.width
        actions = padded(batch[ACTION], width)
        time = self._times(batch, noise).to(actions)
        mixed = time[:, None, None]
        noisy = noise.normal("noise", tuple(actions.shape)).to(actions) * mixed + actions * (1 - mixed)
        predicted = self.model.actions(noisy, time, self.model.context(self._prepare(batch))).to(
            actions.dtype
        )
        parts = self.model.layout.losses(predicted, actions, self._valid_channels(batch, width))
        return Loss(torch.stack([*parts.values()]).sum(0), parts)

    def _times(self, batch: Batch, noise: NoiseSource) -> Tensor:
        """[B]: evenly spread over the global batch, from a random start on."""
        places: Tensor | None = batch.get(BATCH_PLACE)
        if places is None:
            count = len(batch[ACTION])
            places = torch.arange(count, device=batch[ACTION].device) / count
        return (noise.for_batch().uniform("time", (1,)).to(places.device) + places) % LATEST

    def _valid_channels(self, batch: Mapping[str, Tensor], width: int) -> Tensor | None:
        """[B, width] which weighs the channels so that the mean is that of a sample's own actions, where datasets have
        actions of different lengths; None: all count. Action spaces with a fixed meaning learn zeros for the rest."""
        length = batch.get(ACTION_LENGTH)
        if length is None or self.config.action_mode != AUTO:
            return None
        real = self.config.action_space.output
        valid = torch.arange(width, device=length.device) < length[:, None]
        return valid * (real / length[:, None])

    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        config, observation = self.config, self._prepare(batch)
        context = self.model.context(observation)
        shape = (len(observation.domain), config.chunk_size, config.action_space.width)
        start = noise.normal("x", shape).to(context.tokens)
        actions = torch.zeros_like(start)
        for step in range(config.num_denoising_steps, 0, -1):
            time = start.new_full(shape[:1], step / config.num_denoising_steps)
            mixed = time[:, None, None]
            noisy = start * mixed + _continued(actions, batch) * (1 - mixed)
            actions = self.model.actions(noisy, time, context).to(start.dtype)
        chunk = _continued(self.model.layout.output(actions), batch)
        return chunk[..., : config.action.shape[0]]

    def _prepare(self, batch: Batch) -> PreparedObservation:
        config = self.config
        cameras = prepare_cameras(
            config.type, [*config.images], batch, config.resize_imgs_with_padding, "left-top", normalized=True
        )
        count = len(batch[TASK_TOKENS])
        state = batch[STATE] if config.use_proprio else cameras.images[0].new_zeros(count, 0)
        domain = self._domains(batch, count, cameras.images[0].device)
        return PreparedObservation(cameras, batch[TASK_TOKENS], padded(state, config.state_width), domain)

    def image_encoder(self) -> ImageEncoder:
        vlm = self.model.vlm
        drops = vlm.size.vision.drop_path > 0
        return ImageEncoder([vlm.vision_tower], {"size": self.config.resize_imgs_with_padding}, drops)

    def encode_images(self, images: Tensor, camera: str) -> Tensor:
        size = self.config.resize_imgs_with_padding
        return self.model.vlm.encode_images(prepare_images(images, size, "left-top", normalized=True))

    def _domains(self, batch: Batch, count: int, device: torch.device) -> Tensor:
        """[B]"""
        key = self.config.domain_feature_key
        domains = batch.get(DOMAIN) if key is None else batch.get(key, batch.get(DOMAIN))
        if domains is None:
            return torch.full((count,), self.config.domain_id or 0, device=device)
        return domains.flatten(1)[:, 0].long() if domains.ndim > 1 else domains.long()

    def load_backbone(self) -> None:
        log.warning(
            "policy.type=xvla starts from random weights: Florence-2 was never trained on images and text. To start "
            "from published ones, give --policy.path=lerobot/xvla-base"
        )

    @property
    def needs_autocast(self) -> bool:
        return self.model.dtype != torch.bfloat16

    def shard_units(self) -> list[nn.Module]:
        return self.model.blocks()

    def param_groups(self) -> list[ParamGroup]:
        """Three groups by name, as LeRobot's optimizer for this policy makes them."""
        groups: dict[str, list[nn.Parameter]] = {"vlm": [], "soft_prompts": [], "other": []}
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                # "vlm" is also in the name of a projection
                kind = "vlm" if "vlm" in name else "soft_prompts" if "soft_prompt" in name else "other"
                groups[kind].append(parameter)
        config, warm_up = self.config, self.config.optimizer_soft_prompt_warmup_lr_scale
        factors = {
            "vlm": {"lr": VLM_FACTOR, "weight_decay": VLM_FACTOR},
            "soft_prompts": {"lr": config.optimizer_soft_prompt_lr_scale if warm_up is None else warm_up},
        }
        return [
            ParamGroup(parameters, factors=factors.get(name, {}), name=name)
            for name, parameters in groups.items()
            if parameters
        ]


def _continued(actions: Tensor, batch: Batch) -> Tensor:
    """Actions [B, H, width] moved towards those of the last chunk, if there is one.

    Predictions are of clean actions, so the last chunk's can take the place of their beginning: what the network then
    sees is these actions with noise, as in training.
    """
    if PREVIOUS not in batch:
        return actions
    previous = batch[PREVIOUS][:, : actions.shape[1], : actions.shape[2]]
    weights = batch[GUIDANCE_WEIGHTS][..., None].to(actions)  # [H, 1] or [B, H, 1]
    count, length = previous.shape[2], actions.shape[1] - previous.shape[1]
    target = F.pad(previous.to(actions), (0, 0, 0, length))
    guided = actions[..., :count] + weights * (target - actions[..., :count])
    return torch.cat((guided, actions[..., count:]), -1)
