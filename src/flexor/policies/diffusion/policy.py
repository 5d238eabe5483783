"""Diffusion Policy (Chi et al. 2023, https://arxiv.org/abs/2303.04137), the convolutional variant.

A U-Net over time learns to remove noise from a chunk of actions, given the last few observations. Inference
starts from pure noise, so that the policy picks one of several good solutions instead of their average. The
cost is that the network runs once per denoising step; `noise_scheduler_type=DDIM` with few
`num_inference_steps` reduces it.

Parameter names and settings are LeRobot's, so either program can load the other's checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flexor.core.batch import ENV_STATE, STATE, Batch
from flexor.core.machine import keep_compiled_code
from flexor.core.rng import NoiseSource
from flexor.policies.diffusion.config import DiffusionConfig
from flexor.policies.diffusion.unet import ConditionalUnet1d
from flexor.policies.nn.camera import RgbEncoder
from flexor.policies.nn.denoising import DenoisingPolicy
from flexor.policies.nn.diffusion import DiffusionSchedule
from flexor.policies.nn.recompute import recompute


class Diffusion(DenoisingPolicy):
    Config = DiffusionConfig
    config: DiffusionConfig

    def __init__(self, config: DiffusionConfig):
        super().__init__(config)
        self.objective = DiffusionSchedule(config)
        self.diffusion = DiffusionModel(config)
        if config.gradient_checkpointing:
            for unit in self.shard_units():
                recompute(unit)

    def observe(self, batch: Batch, noise: NoiseSource) -> Tensor:
        return self.diffusion.observe(batch, noise)

    def denoise(self, x: Tensor, level: Tensor, observed: Tensor) -> Tensor:
        return self.diffusion.unet(x, level, observed)

    def load_backbone(self) -> None:
        for encoder in self.diffusion.encoders():
            encoder.load_imagenet()

    def shard_units(self) -> list[nn.Module]:
        return [*self.diffusion.encoders(), *self.diffusion.unet_blocks]


class DiffusionModel(nn.Module):
    """The encoders of observations, and the U-Net. Registered in LeRobot's order."""

    def __init__(self, config: DiffusionConfig):
        super().__init__()
        self.config = config
        assert config.state is not None
        step_features = config.state.shape[0]
        if config.environment_state:
            step_features += config.environment_state.shape[0]
        if config.images:
            separate = config.use_separate_rgb_encoder_per_camera
            shapes = [camera.shape for camera in config.images.values()]
            encoder_shapes = shapes if separate else shapes[:1]
            encoders = [RgbEncoder(config, shape, config.resize_shape) for shape in encoder_shapes]
            self.rgb_encoder = nn.ModuleList(encoders) if separate else encoders[0]
            step_features += len(config.images) * encoders[0].feature_dim
        unet = ConditionalUnet1d(
            config.action.shape[0],
            step_features * config.n_obs_steps,
            config.down_dims,
            config.kernel_size,
            config.n_groups,
            config.diffusion_step_embed_dim,
            config.use_film_scale_modulation,
        )
        self.unet_blocks = unet.blocks()  # a plain list: not registered a second time
        if config.compile_model:
            keep_compiled_code()
        self.unet: Any = torch.compile(unet, mode=config.compile_mode) if config.compile_model else unet

    def encoders(self) -> list[RgbEncoder]:
        return [module for module in self.modules() if isinstance(module, RgbEncoder)]

    def observe(self, batch: Batch, noise: NoiseSource) -> Tensor:
        """The condition of the U-Net, [B, T * features]: for each time step the state, images, environment state."""
        features = [batch[STATE]]  # [B, T, D]
        if self.config.images:
            features.append(self._encode_images([batch[key] for key in self.config.images], noise))
        if self.config.environment_state:
            features.append(batch[ENV_STATE])
        return torch.cat(features, -1).flatten(1)

    def _encode_images(self, cameras: list[Tensor], noise: NoiseSource) -> Tensor:
        """Cameras [B, T, 3, H, W] -> [B, T, cameras * features]."""
        if isinstance(self.rgb_encoder, nn.ModuleList):
            pairs = zip(self.rgb_encoder, cameras)
            return torch.cat([encode(x, noise, f"crop{i}") for i, (encode, x) in enumerate(pairs)], -1)
        return self.rgb_encoder(torch.stack(cameras, 2), noise).flatten(2)
