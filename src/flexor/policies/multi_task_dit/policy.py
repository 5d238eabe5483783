"""The multi-task diffusion transformer (after TRI's Large Behavior Models, https://arxiv.org/abs/2507.05331).

CLIP encodes the camera images and the task. Its vectors and the robot's state condition a transformer that turns
noise into an action chunk, by diffusion or by flow matching. With one vector per image, the policy is small and
fast among those that understand language. It is weaker at tasks that need exact positions in an image.

Parameter names and settings are LeRobot's, so either program can load the other's checkpoints.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from flexor.core.batch import IMAGE_FEATURES, STATE, Batch
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.rng import NoiseSource
from flexor.policies.base import ParamGroup
from flexor.policies.image_encoder import ImageEncoder
from flexor.policies.multi_task_dit.clip import ClipText, ClipVision
from flexor.policies.multi_task_dit.config import MultiTaskDiTConfig
from flexor.policies.multi_task_dit.transformer import DiffusionTransformer
from flexor.policies.nn.camera import resize_and_crop
from flexor.policies.nn.denoising import DenoisingPolicy
from flexor.policies.nn.diffusion import DiffusionSchedule
from flexor.policies.nn.flow import FlowMatching
from flexor.policies.processing.tokenize import TASK_MASK, TASK_TOKENS


class MultiTaskDiT(DenoisingPolicy):
    Config = MultiTaskDiTConfig
    config: MultiTaskDiTConfig

    def __init__(self, config: MultiTaskDiTConfig):
        super().__init__(config)
        self.observation_encoder = ObservationEncoder(config)
        self.noise_predictor = DiffusionTransformer(
            config.action.shape[0],
            config.horizon,
            self.observation_encoder.out_dim,
            dim=config.hidden_dim,
            depth=config.num_layers,
            heads=config.num_heads,
            time_dim=config.timestep_embed_dim,
            dropout=config.dropout,
            rope_base=config.rope_base if config.use_rope else None,
            learned_positions=config.use_positional_encoding,
        )
        self.objective = make_objective(config)

    def observe(self, batch: Batch, noise: NoiseSource) -> Tensor:
        return self.observation_encoder(batch, noise)

    def denoise(self, x: Tensor, level: Tensor, observed: Tensor) -> Tensor:
        return self.noise_predictor(x, level, observed)

    def load_backbone(self) -> None:
        for encoder in self.observation_encoder.encoders():
            encoder.load_pretrained()

    def image_encoder(self) -> ImageEncoder | None:
        config, vision = self.config, self.observation_encoder.vision()
        if not vision:
            return None
        sizes = {"resized": config.resized, "crop": config.crop}
        return ImageEncoder(vision, sizes, config.crop is not None and config.image_crop_is_random)

    def encode_images(self, images: Tensor, camera: str) -> Tensor:
        return self.observation_encoder.encode_images(images, camera)

    def shard_units(self) -> list[nn.Module]:
        layers = [layer for encoder in self.observation_encoder.encoders() for layer in encoder.layers()]
        return [*layers, *self.noise_predictor.transformer_blocks]

    def param_groups(self) -> list[ParamGroup]:
        # includes the image CLIP even if it is frozen: LeRobot's optimizer numbers its parameters too
        encoders = "observation_encoder.vision_encoder"
        vision = [p for name, p in self.named_parameters() if name.startswith(encoders)]
        rest = [p for name, p in self.named_parameters() if p.requires_grad and not name.startswith(encoders)]
        rate = self.config.optimizer_lr * self.config.vision_encoder_lr_multiplier
        return [ParamGroup(rest), ParamGroup(vision, {"lr": rate})]


def make_objective(config: MultiTaskDiTConfig) -> DiffusionSchedule | FlowMatching:
    if config.objective == "diffusion":
        return DiffusionSchedule(config)
    flow = partial(FlowMatching, config.sigma_min, config.num_integration_steps, config.integration_method)
    if config.timestep_sampling_strategy == "uniform":
        return flow()
    return flow(
        time_beta=(config.timestep_sampling_alpha, config.timestep_sampling_beta),
        time_max=config.timestep_sampling_s,
    )


class ObservationEncoder(nn.Module):
    """State, cameras and task -> one vector. Per time step: the state, each camera's vector, the task's vector."""

    def __init__(self, config: MultiTaskDiTConfig):
        super().__init__()
        self.config = config
        self.cameras = list(config.images)
        if self.cameras and config.use_separate_rgb_encoder_per_camera:
            self.vision_encoders = nn.ModuleList(ClipVision(config.vision_encoder_name) for _ in self.cameras)
        elif self.cameras:
            self.vision_encoder = ClipVision(config.vision_encoder_name)
        self.text_encoder = ClipText(config.text_encoder_name, config.hidden_dim)
        assert config.state is not None
        step_features = config.state.shape[0] + config.hidden_dim
        if self.cameras:
            step_features += len(self.cameras) * self.vision()[0].out_dim
        self.out_dim = config.n_obs_steps * step_features
        self._check(config)
        if config.vision_encoder_lr_multiplier == 0:
            for encoder in self.vision():
                encoder.requires_grad_(False)

    def vision(self) -> list[ClipVision]:
        """The image encoders: one per camera, one for all cameras, or none."""
        if not self.cameras:
            return []
        shared = not self.config.use_separate_rgb_encoder_per_camera
        return [self.vision_encoder] if shared else list(self.vision_encoders)  # type: ignore[arg-type]

    def encoders(self) -> list[ClipVision | ClipText]:
        return [*self.vision(), self.text_encoder]

    def _check(self, config: MultiTaskDiTConfig) -> None:
        """Refuse settings that the loaded CLIP does not support."""
        if config.tokenizer_max_length > self.text_encoder.max_length:
            raise ConfigError(
                f"policy.tokenizer_max_length={config.tokenizer_max_length}: {config.text_encoder_name} supports "
                f"{self.text_encoder.max_length} tokens at most."
            )
        if not self.cameras:
            return
        if config.crop != config.image_crop_shape:
            log.warning(
                "policy.image_crop_shape=%s is larger than the images (%s): they are not cropped",
                config.image_crop_shape,
                config.resized,
            )
        size, expected = config.crop or config.resized, self.vision()[0].image_size
        if size != (expected, expected):
            raise ConfigError(
                f"Images are {size[0]} x {size[1]} after resizing and cropping, but {config.vision_encoder_name} takes "
                f"{expected} x {expected}: set --policy.image_resize_shape='[{expected}, {expected}]' and "
                "--policy.image_crop_shape=null, or other values that result in this size."
            )

    def forward(self, batch: Batch, noise: NoiseSource) -> Tensor:
        state = batch[STATE]  # [B, T, S]
        features = [state, self._encode_images(batch, noise)] if self.cameras else [state]
        task = self.text_encoder(batch[TASK_TOKENS], batch[TASK_MASK])
        features.append(task[:, None].expand(-1, state.shape[1], -1))
        return torch.cat(features, -1).flatten(1)  # [B, T * (state + cameras + task)]

    def _encode_images(self, batch: Batch, noise: NoiseSource) -> Tensor:
        """CLIP's vectors of all cameras: [B, T, cameras * D]. Cameras that share an encoder are encoded together."""
        if f"{IMAGE_FEATURES}{self.cameras[0]}" in batch:  # [B, T, D] each
            return torch.cat([batch[f"{IMAGE_FEATURES}{camera}"] for camera in self.cameras], -1)
        encoders = self.vision()
        groups = [self.cameras] if len(encoders) == 1 else [[camera] for camera in self.cameras]
        features = []
        for index, (encoder, cameras) in enumerate(zip(encoders, groups)):
            images = torch.stack([batch[camera] for camera in cameras], 2)  # [B, T, N, 3, H, W]
            inputs = self._resize_and_crop(images.flatten(1, 2), noise, f"crop{index}")  # [B, T * N, 3, h, w]
            vectors = encoder(inputs.flatten(0, 1)).unflatten(0, (*images.shape[:2], -1))
            features.append(vectors.flatten(2))  # [B, T, N * D]
        return torch.cat(features, -1)

    def encode_images(self, images: Tensor, camera: str) -> Tensor:
        """CLIP's vectors [B, D] of a camera's images [B, 3, H, W], cropped in the centre."""
        encoders = self.vision()
        encoder = encoders[self.cameras.index(camera) if len(encoders) > 1 else 0]
        return encoder(resize_and_crop(images, self.config.resized, self.config.crop, None))

    def _resize_and_crop(self, images: Tensor, noise: NoiseSource, name: str) -> Tensor:
        """Images [B, N, 3, H, W] in the input size of CLIP."""
        config = self.config
        random = noise if self.training and config.image_crop_is_random else None
        sized = resize_and_crop(images, config.resized, config.crop, random, name)
        return sized.unflatten(0, images.shape[:2])
