"""The settings of Diffusion Policy, under LeRobot's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from flexor.core.batch import ENV_STATE
from flexor.core.errors import ConfigError
from flexor.core.rng import NoiseSource
from flexor.policies.calibration import Calibration
from flexor.policies.nn.camera import VisionSettings, resize_and_crop
from flexor.policies.nn.denoising import DenoisingConfig


@dataclass
class DiffusionConfig(VisionSettings, DenoisingConfig):
    """Defaults are LeRobot's."""

    type: ClassVar[str] = "diffusion"
    trains_in_bf16: ClassVar[bool] = True
    calibration = Calibration(narrow={"down_dims": (64, 128, 256)})

    drop_n_last_frames: int = 7
    """Frames at the end of an episode at which no sample starts: most of its actions would be padding."""
    resize_shape: tuple[int, int] | None = None
    """Height and width to which images are resized first."""
    crop_ratio: float = 1.0
    """With policy.resize_shape: size of the crop as a fraction of height and width; 1 for no crop."""
    crop_shape: tuple[int, int] | None = None
    """Without policy.resize_shape: height and width of the crop."""
    use_separate_rgb_encoder_per_camera: bool = True
    """Use a separate image encoder for each camera instead of one for all."""
    down_dims: tuple[int, ...] = (512, 1024, 2048)
    """Channels of the U-Net at each temporal resolution, the finest first."""
    kernel_size: int = 5
    """Kernel size of the U-Net's convolutions, in time steps."""
    n_groups: int = 8
    """Groups of the U-Net's group normalisation."""
    diffusion_step_embed_dim: int = 128
    """Size of the embedding of the noise level."""
    use_film_scale_modulation: bool = True
    """Observations scale the U-Net's channels in addition to shifting them."""
    gradient_checkpointing: bool = False
    """Recompute blocks in the backward pass to save memory, as --activation_checkpointing does."""
    compile_model: bool = False
    """Compile the U-Net with torch.compile."""
    compile_mode: str = "reduce-overhead"
    """torch.compile's mode, with policy.compile_model."""
    scheduler_warmup_steps: int = 500

    def validate(self) -> None:
        super().validate()
        self.require(1, "n_groups")
        self.check_diffusion()
        self._check_unet()
        self._check_pictures()
        if self.input_features and not self.images and not self.environment_state:
            raise self.missing_input(f"a camera (observation.image...) or {ENV_STATE}")

    def _check_unet(self) -> None:
        if not self.down_dims or any(width % self.n_groups for width in self.down_dims):
            raise ConfigError(
                f"policy.down_dims={list(self.down_dims)} must have at least one value, all multiples of "
                f"policy.n_groups={self.n_groups}."
            )
        if self.down_dims[0] % 8:
            raise ConfigError(
                f"policy.down_dims={list(self.down_dims)}: the first value must be a multiple of 8."
            )
        halvings = 2 ** len(self.down_dims)
        if self.horizon % halvings:
            raise ConfigError(
                f"policy.horizon={self.horizon} must be a multiple of {halvings} (2 to the power of the number of "
                f"values in policy.down_dims={list(self.down_dims)})."
            )
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ConfigError(f"policy.kernel_size={self.kernel_size} must be odd.")
        if self.diffusion_step_embed_dim < 4 or self.diffusion_step_embed_dim % 2:
            raise ConfigError(
                f"policy.diffusion_step_embed_dim={self.diffusion_step_embed_dim} must be even, and at least 4."
            )

    def _check_pictures(self) -> None:
        if not 0 < self.crop_ratio <= 1:
            raise ConfigError(f"policy.crop_ratio={self.crop_ratio} must be more than 0 and at most 1.")
        if self.resize_shape and min(self.resize_shape) < 1:
            raise ConfigError(f"policy.resize_shape={list(self.resize_shape)} must be at least 1 by 1.")
        if self.resize_shape and self.crop_shape not in (None, self.crop):
            raise ConfigError(
                f"policy.crop_shape={list(self.crop_shape or ())} has no effect with policy.resize_shape: "
                "use policy.crop_ratio instead."
            )
        shapes = {key: camera.shape for key, camera in self.images.items()}
        if self.resize_shape:
            shapes = dict.fromkeys(shapes, (3, *self.resize_shape))
        self.check_vision(shapes)

    def view_images(self, images: Tensor, camera: str, noise: NoiseSource | None = None) -> Tensor:
        name = f"crop{[*self.images].index(camera)}" if self.use_separate_rgb_encoder_per_camera else "crop"
        random = noise if self.crop_is_random else None
        return resize_and_crop(images, self.resize_shape, self.crop, random, name).unflatten(
            0, images.shape[:-3]
        )

    @property
    def crop(self) -> tuple[int, int] | None:
        if self.resize_shape is None:
            return self.crop_shape
        if self.crop_ratio == 1:
            return None
        height, width = self.resize_shape
        return int(height * self.crop_ratio), int(width * self.crop_ratio)

    @property
    def computes_with_bf16_copies(self) -> bool:
        return not (self.compile_model or self.gradient_checkpointing)

    @property
    def drop_last_frames(self) -> int:
        return self.drop_n_last_frames
