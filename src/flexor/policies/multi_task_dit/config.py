"""The settings of Multi-Task DiT, under LeRobot's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from flexor.core.errors import ConfigError
from flexor.core.rng import NoiseSource
from flexor.policies.base import MOST_DROPOUT
from flexor.policies.nn.camera import resize_and_crop
from flexor.policies.nn.denoising import DenoisingConfig
from flexor.policies.processing.pipeline import ProcessingStep, Stats
from flexor.policies.processing.tokenize import Tokenize

Size = tuple[int, int]  # height, width


@dataclass
class MultiTaskDiTConfig(DenoisingConfig):
    """Defaults are LeRobot's. The settings of diffusion apply with policy.objective=diffusion."""

    type: ClassVar[str] = "multi_task_dit"
    trains_in_bf16: ClassVar[bool] = True

    horizon: int = 32
    n_action_steps: int = 24
    objective: Literal["diffusion", "flow_matching"] = "diffusion"
    """How noise is turned into actions."""
    sigma_min: float = 0.0
    """Flow matching: amount of noise left at the end of a path."""
    num_integration_steps: int = 100
    """Flow matching: integration steps at inference. Fewer steps are faster and less accurate."""
    integration_method: Literal["euler", "rk4"] = "euler"
    """Flow matching: euler runs the network once per step, rk4 (Runge-Kutta) four times."""
    timestep_sampling_strategy: Literal["uniform", "beta"] = "beta"
    """Flow matching: distribution of the times in training: uniform, or beta, which draws more times near noise."""
    timestep_sampling_s: float = 0.999
    """Flow matching, beta: the latest time in training."""
    timestep_sampling_alpha: float = 1.5
    """Flow matching, beta: alpha of the beta distribution."""
    timestep_sampling_beta: float = 1.0
    """Flow matching, beta: beta of the beta distribution."""
    hidden_dim: int = 512
    """Width of the transformer."""
    num_layers: int = 6
    """Layers of the transformer."""
    num_heads: int = 8
    """Attention heads."""
    dropout: float = 0.1
    """Dropout of the attention weights."""
    use_positional_encoding: bool = False
    """Add a learned embedding for each position in the chunk."""
    timestep_embed_dim: int = 256
    """Size of the embedding of the noise level."""
    use_rope: bool = True
    """Encode positions in the chunk with rotary position embedding (RoPE)."""
    rope_base: float = 10_000.0
    """RoPE base: its longest wavelength, divided by 2 pi."""
    vision_encoder_name: str = "openai/clip-vit-base-patch16"
    """The CLIP that encodes images: a Hub repository, or a folder with "clip" in its path."""
    use_separate_rgb_encoder_per_camera: bool = False
    """Use a separate CLIP for each camera instead of one for all."""
    vision_encoder_lr_multiplier: float = 0.1
    """Learning rate of the image CLIP as a fraction of policy.optimizer_lr. 0 freezes it."""
    image_resize_shape: Size | None = None
    """Resize images to this height and width first."""
    image_crop_shape: Size | None = (224, 224)
    """Then crop to this height and width, which must be the input size of the CLIP; skipped if images are smaller."""
    image_crop_is_random: bool = True
    """In training crop at a random position, the same for all images of a sample; otherwise in the centre."""
    text_encoder_name: str = "openai/clip-vit-base-patch16"
    """The CLIP that encodes the task. It is never trained."""
    tokenizer_max_length: int = 77
    """Maximum number of tokens of a task."""
    tokenizer_padding: Literal["max_length", "longest"] = "max_length"
    """Pad shorter tasks to policy.tokenizer_max_length, or to the longest task of the batch."""
    tokenizer_padding_side: Literal["left", "right"] = "right"
    """Side on which tasks are padded."""
    tokenizer_truncation: bool = True
    """Truncate longer tasks."""
    optimizer_lr: float = 2e-5
    optimizer_weight_decay: float = 0.0
    drop_n_last_frames: int | None = None
    """Frames at the end of an episode at which no sample starts; default horizon - n_action_steps - n_obs_steps + 1."""

    def validate(self) -> None:
        super().validate()
        self.require(
            1, "hidden_dim", "num_layers", "num_heads", "num_integration_steps", "tokenizer_max_length"
        )
        self.require(4, "timestep_embed_dim")
        self.require(0, "vision_encoder_lr_multiplier", "drop_n_last_frames")
        self.require(0, "dropout", high=MOST_DROPOUT)
        self.require(0, "sigma_min", high=1)
        self.require(1e-3, "timestep_sampling_s", high=1)
        self.require(1e-3, "timestep_sampling_alpha", "timestep_sampling_beta")
        if self.objective == "diffusion":
            self.check_diffusion()
        self._check_sizes()

    def _check_sizes(self) -> None:
        if self.hidden_dim % (self.num_heads * (2 if self.use_rope else 1)):
            raise ConfigError(
                f"policy.hidden_dim={self.hidden_dim} must be a multiple of policy.num_heads={self.num_heads}"
                f"{', with policy.use_rope=true of twice that' if self.use_rope else ''}."
            )
        if self.timestep_embed_dim % 2:
            raise ConfigError(f"policy.timestep_embed_dim={self.timestep_embed_dim} must be even.")
        for name in ("vision_encoder_name", "text_encoder_name"):
            if "clip" not in getattr(self, name).lower():
                raise ConfigError(
                    f"policy.{name}={getattr(self, name)!r} must be a CLIP, with "
                    "'clip' in its name: LeRobot supports no other encoder."
                )

    @property
    def computes_with_bf16_copies(self) -> bool:
        return True

    @property
    def drop_last_frames(self) -> int:
        if self.drop_n_last_frames is not None:
            return self.drop_n_last_frames
        return self.horizon - self.n_action_steps - self.n_obs_steps + 1

    def steps_before(self, stats: Stats) -> list[ProcessingStep]:
        tokenize = Tokenize(
            self.text_encoder_name,
            max_length=self.tokenizer_max_length,
            padding=self.tokenizer_padding,
            padding_side=self.tokenizer_padding_side,
            truncation=self.tokenizer_truncation,
        )
        rename, to_batch, *other_steps = super().steps_before(stats)
        return [rename, to_batch, tokenize, *other_steps]

    @property
    def resized(self) -> Size:
        """Height and width of images before they are cropped."""
        height, width = next(iter(self.images.values())).shape[1:]
        return self.image_resize_shape or (height, width)

    def view_images(self, images: Tensor, camera: str, noise: NoiseSource | None = None) -> Tensor:
        number = [*self.images].index(camera) if self.use_separate_rgb_encoder_per_camera else 0
        random = noise if self.image_crop_is_random else None
        sized = resize_and_crop(images, self.resized, self.crop, random, f"crop{number}")
        return sized.unflatten(0, images.shape[:-3])

    @property
    def crop(self) -> Size | None:
        """Height and width of the crop; None if images are smaller, as in LeRobot."""
        crop = self.image_crop_shape
        if not self.images or crop is None or crop[0] > self.resized[0] or crop[1] > self.resized[1]:
            return None
        return crop
