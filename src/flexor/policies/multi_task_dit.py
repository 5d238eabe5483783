"""The multi-task diffusion transformer (after TRI's Large Behavior Models, https://arxiv.org/abs/2507.05331).

CLIP sees the cameras and reads the task; its vectors and the robot's state steer a transformer that turns
noise into an action chunk, by diffusion or by flow matching. One vector per picture makes it small and
quick for a policy that understands language; what needs an exact place in a picture is not its strength.

Parameter names and settings are LeRobot's, so checkpoints go both ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.batch import STATE, Batch
from flexor.errors import ConfigError
from flexor.log import log
from flexor.policies.base import MOST_DROPOUT, NoiseSource, ParamGroup
from flexor.policies.blocks.clip import ClipText, ClipVision
from flexor.policies.blocks.denoising import DenoisingConfig, DenoisingPolicy
from flexor.policies.blocks.dit import DiffusionTransformer
from flexor.policies.blocks.flow import FlowMatching
from flexor.policies.blocks.schedules import DiffusionSchedule
from flexor.policies.blocks.vision import center_crop, random_crop
from flexor.policies.processing import TASK_MASK, TASK_TOKENS

Size = tuple[int, int]  # height, width


@dataclass
class MultiTaskDiTConfig(DenoisingConfig):
    """Defaults are LeRobot's. Those of diffusion count when that is the objective."""

    type: ClassVar[str] = "multi_task_dit"

    horizon: int = 32
    n_action_steps: int = 24
    objective: Literal["diffusion", "flow_matching"] = "diffusion"
    """How noise becomes actions."""
    sigma_min: float = 0.0
    """Flow matching: noise left at the end of a path."""
    num_integration_steps: int = 100
    """Flow matching: steps when acting. Fewer are faster and less exact."""
    integration_method: Literal["euler", "rk4"] = "euler"
    """Flow matching: euler asks the network once per step, rk4 (Runge-Kutta) four times."""
    timestep_sampling_strategy: Literal["uniform", "beta"] = "beta"
    """Flow matching: which times are trained: all alike, or (beta) more of those near noise."""
    timestep_sampling_s: float = 0.999
    """Flow matching, beta: the latest time trained."""
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
    """Dropout of attention."""
    use_positional_encoding: bool = False
    """Add a learned vector for each place in the chunk."""
    timestep_embed_dim: int = 256
    """Size of the vector that says how noisy the chunk is."""
    use_rope: bool = True
    """Tell places in the chunk by rotary position embedding."""
    rope_base: float = 10_000.0
    """Its longest wavelength, over 2 pi."""
    vision_encoder_name: str = "openai/clip-vit-base-patch16"
    """The CLIP that sees: a Hub repository, or a folder whose path has "clip" in it."""
    use_separate_rgb_encoder_per_camera: bool = False
    """A CLIP for each camera instead of one for all."""
    vision_encoder_lr_multiplier: float = 0.1
    """The CLIP's learning rate as a part of policy.optimizer_lr. 0 freezes it."""
    image_resize_shape: Size | None = None
    """Resize pictures to this height and width first."""
    image_crop_shape: Size | None = (224, 224)
    """Then cut out this height and width, which must be what the CLIP takes; skipped if pictures are smaller."""
    image_crop_is_random: bool = True
    """In training cut out anywhere (the same place in all pictures of a sample), else in the middle."""
    text_encoder_name: str = "openai/clip-vit-base-patch16"
    """The CLIP that reads the task. It is never trained."""
    tokenizer_max_length: int = 77
    """How many tokens of a task are read."""
    tokenizer_padding: Literal["max_length", "longest"] = "max_length"
    """Fill up shorter tasks to that length, or to the longest of a batch."""
    tokenizer_padding_side: Literal["left", "right"] = "right"
    """On which side."""
    tokenizer_truncation: bool = True
    """Cut off longer tasks."""
    optimizer_lr: float = 2e-5
    optimizer_weight_decay: float = 0.0
    drop_n_last_frames: int | None = None
    """Frames at the end of an episode that no sample starts at; as many as have no action to execute unless given."""

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
                f"{', with policy.use_rope of twice that' if self.use_rope else ''}."
            )
        if self.timestep_embed_dim % 2:
            raise ConfigError(f"policy.timestep_embed_dim={self.timestep_embed_dim} must be even.")
        for name in ("vision_encoder_name", "text_encoder_name"):
            if "clip" not in getattr(self, name).lower():
                raise ConfigError(
                    f"policy.{name}={getattr(self, name)!r} must be a CLIP, with "
                    "'clip' in its name: LeRobot takes no other."
                )

    @property
    def drop_last_frames(self) -> int:
        if self.drop_n_last_frames is not None:
            return self.drop_n_last_frames
        return self.horizon - self.n_action_steps - self.n_obs_steps + 1

    @property
    def tokenizer(self) -> dict[str, Any]:
        """How the task becomes tokens."""
        return {
            "tokenizer_name": self.text_encoder_name,
            "max_length": self.tokenizer_max_length,
            "padding": self.tokenizer_padding,
            "padding_side": self.tokenizer_padding_side,
            "truncation": self.tokenizer_truncation,
        }

    @property
    def resized(self) -> Size:
        """Height and width of pictures before they are cropped."""
        height, width = next(iter(self.images.values())).shape[1:]
        return self.image_resize_shape or (height, width)

    @property
    def crop(self) -> Size | None:
        """What is cut out of pictures; nothing if they are smaller, as LeRobot has it."""
        crop = self.image_crop_shape
        if not self.images or crop is None or crop[0] > self.resized[0] or crop[1] > self.resized[1]:
            return None
        return crop


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

    def shard_units(self) -> list[nn.Module]:
        layers = [layer for encoder in self.observation_encoder.encoders() for layer in encoder.layers()]
        return [*layers, *self.noise_predictor.transformer_blocks]

    def param_groups(self) -> list[ParamGroup]:
        # a CLIP that sees is among them even if it is frozen: LeRobot's optimizer numbers its parameters too
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
    """State, cameras and task -> one vector. Per moment: state, each camera's vector, the task's."""

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
        moment = config.state.shape[0] + config.hidden_dim
        if self.cameras:
            moment += len(self.cameras) * self.vision()[0].out_dim
        self.out_dim = config.n_obs_steps * moment
        self._check(config)
        if config.vision_encoder_lr_multiplier == 0:
            for encoder in self.vision():
                encoder.requires_grad_(False)

    def vision(self) -> list[ClipVision]:
        """One for each camera, one for all of them, or none."""
        if not self.cameras:
            return []
        shared = not self.config.use_separate_rgb_encoder_per_camera
        return [self.vision_encoder] if shared else list(self.vision_encoders)  # type: ignore[arg-type]

    def encoders(self) -> list[ClipVision | ClipText]:
        return [*self.vision(), self.text_encoder]

    def _check(self, config: MultiTaskDiTConfig) -> None:
        """Refuse what the CLIP that was found can't take."""
        if config.tokenizer_max_length > self.text_encoder.max_length:
            raise ConfigError(
                f"policy.tokenizer_max_length={config.tokenizer_max_length}: {config.text_encoder_name} reads "
                f"{self.text_encoder.max_length} tokens at most."
            )
        if not self.cameras:
            return
        if config.crop != config.image_crop_shape:
            log.warning(
                "policy.image_crop_shape=%s is larger than the pictures (%s): they are not cropped",
                config.image_crop_shape,
                config.resized,
            )
        size, wanted = config.crop or config.resized, self.vision()[0].image_size
        if size != (wanted, wanted):
            raise ConfigError(
                f"Pictures are {size[0]} x {size[1]}, but {config.vision_encoder_name} takes {wanted} x {wanted}: set "
                f"--policy.image_resize_shape='[{wanted}, {wanted}]' and --policy.image_crop_shape=null, or another "
                "pair that ends with this size."
            )

    def forward(self, batch: Batch, noise: NoiseSource) -> Tensor:
        state = batch[STATE]  # [B, T, S]
        seen = [state, self._see(batch, noise)] if self.cameras else [state]
        task = self.text_encoder(batch[TASK_TOKENS], batch[TASK_MASK])
        seen.append(task[:, None].expand(-1, state.shape[1], -1))
        return torch.cat(seen, -1).flatten(1)  # [B, T * (state + cameras + task)]

    def _see(self, batch: Batch, noise: NoiseSource) -> Tensor:
        """What CLIP makes of all cameras: [B, T, cameras * D]. Those that share an encoder go through it together."""
        encoders = self.vision()
        groups = [self.cameras] if len(encoders) == 1 else [[camera] for camera in self.cameras]
        seen = []
        for index, (encoder, cameras) in enumerate(zip(encoders, groups)):
            pictures = torch.stack([batch[camera] for camera in cameras], 2)  # [B, T, N, 3, H, W]
            fitted = self._fit(pictures.flatten(1, 2), noise, f"crop{index}")  # [B, T * N, 3, h, w]
            vectors = encoder(fitted.flatten(0, 1)).unflatten(0, (*pictures.shape[:2], -1))
            seen.append(vectors.flatten(2))  # [B, T, N * D]
        return torch.cat(seen, -1)

    def _fit(self, pictures: Tensor, noise: NoiseSource, name: str) -> Tensor:
        """Pictures [B, N, 3, H, W] in the size CLIP takes."""
        config = self.config
        size = tuple(pictures.shape[-2:])
        if size != config.resized:
            flat = F.interpolate(pictures.flatten(0, 1), config.resized, mode="bilinear", antialias=True)
            pictures = flat.unflatten(0, pictures.shape[:2])
        if config.crop is None:
            return pictures
        if self.training and config.image_crop_is_random:
            return random_crop(pictures, config.crop, noise, name)
        return center_crop(pictures, config.crop)
