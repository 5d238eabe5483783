"""The settings of VQ-BeT, under LeRobot's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from flexor.core.batch import STATE
from flexor.core.errors import ConfigError
from flexor.core.rng import NoiseSource
from flexor.policies.base import MOST_DROPOUT, Calibration, PolicyConfig
from flexor.policies.features import Kind, Normalization
from flexor.policies.nn.adam import AdamSettings
from flexor.policies.nn.camera import VisionSettings, resize_and_crop

TOKENS_PER_STEP = 3  # image, state, and an action query


@dataclass
class VQBeTConfig(VisionSettings, AdamSettings, PolicyConfig):
    """Defaults are those for PushT, as LeRobot sets them."""

    type: ClassVar[str] = "vqbet"
    trains_in_bf16: ClassVar[bool] = False  # rounding flips codes, and the small network gains no time
    calibration = Calibration(cameras=1, height=96, width=96)

    n_obs_steps: int = 5
    n_action_pred_token: int = 3
    """Number of chunks predicted from the current step on, each starting one step later; only the first is executed."""
    action_chunk_size: int = 5
    """Number of actions in a chunk (two codes); all are executed before the next prediction."""
    normalization_mapping: dict[Kind, Normalization] = field(
        default_factory=lambda: {Kind.VISUAL: "IDENTITY", Kind.STATE: "MIN_MAX", Kind.ACTION: "MIN_MAX"}
    )
    crop_shape: tuple[int, int] | None = (84, 84)
    n_vqvae_training_steps: int = 20000
    """Optimizer steps of the first phase, which trains the action vocabulary alone (at least one)."""
    vqvae_n_embed: int = 16
    """Number of codes in each of the two codebooks."""
    vqvae_embedding_dim: int = 256
    """Size of a code."""
    vqvae_enc_hidden_dim: int = 128
    """Width of the action auto-encoder."""
    gpt_block_size: int = 500
    """Maximum number of tokens of the transformer: at least 3 n_obs_steps + n_action_pred_token - 1."""
    gpt_input_dim: int = 512
    """Size of an input token (the projection of an image or a state)."""
    gpt_output_dim: int = 512
    """Size of the transformer's output, from which codes and offsets are predicted."""
    gpt_n_layer: int = 8
    """Layers of the transformer."""
    gpt_n_head: int = 8
    """Attention heads."""
    gpt_hidden_dim: int = 512
    """Width of the transformer."""
    dropout: float = 0.1
    """Dropout in the transformer."""
    offset_loss_weight: float = 10000.0
    """Weight of the offset error in the loss."""
    primary_code_loss_weight: float = 5.0
    """Weight of the first code's loss."""
    secondary_code_loss_weight: float = 0.5
    """Weight of the second code's loss."""
    bet_softmax_temperature: float = 0.1
    """Temperature of code sampling: near 0 always the likeliest code, 1 the predicted probabilities."""
    sequentially_select: bool = False
    """Predict the second code from the first one, instead of both at once."""
    optimizer_vqvae_lr: float = 1e-3
    """Learning rate of the first phase."""
    optimizer_vqvae_weight_decay: float = 1e-4
    """Weight decay of the first phase."""
    scheduler_warmup_steps: int = 500
    """Steps of warm-up at the beginning of the second phase (--scheduler.num_warmup_steps takes precedence)."""

    def __post_init__(self) -> None:
        # LeRobot counts tokens by declared features: declare only features that have a token
        self.input_features = {**self.images, **({STATE: self.state} if self.state else {})}

    def validate(self) -> None:
        self.require(1, "n_obs_steps", "n_action_pred_token", "action_chunk_size")
        self.require(1, "vqvae_n_embed", "vqvae_embedding_dim", "vqvae_enc_hidden_dim")
        self.require(1, "gpt_input_dim", "gpt_output_dim", "gpt_n_layer", "gpt_n_head", "gpt_hidden_dim")
        self.require(0, "dropout", high=MOST_DROPOUT)
        if self.bet_softmax_temperature <= 0:
            raise ConfigError(
                f"policy.bet_softmax_temperature={self.bet_softmax_temperature} must be more than 0; "
                "1e-3 always takes the likeliest code."
            )
        if self.gpt_hidden_dim % self.gpt_n_head:
            raise ConfigError(
                f"policy.gpt_hidden_dim={self.gpt_hidden_dim} must be a multiple of "
                f"policy.gpt_n_head={self.gpt_n_head}."
            )
        tokens = TOKENS_PER_STEP * self.n_obs_steps + self.n_action_pred_token - 1
        if self.gpt_block_size < tokens:
            raise ConfigError(
                f"policy.gpt_block_size={self.gpt_block_size} is too small for the {tokens} tokens of "
                f"policy.n_obs_steps={self.n_obs_steps} and policy.n_action_pred_token={self.n_action_pred_token}."
            )
        cameras = {name: camera.shape for name, camera in self.images.items()}
        self.check_vision(cameras)
        if self.output_features and (len(cameras) != 1 or self.state is None):
            raise ConfigError(
                f"VQ-BeT requires one camera and {STATE}, but the inputs are "
                f"{', '.join(self.input_features) or 'neither'}. Name the two in policy.input_features, with their "
                "type and shape."
            )

    def scheduler_preset(self) -> dict[str, Any]:
        return {
            "type": "vqbet",
            "num_warmup_steps": self.scheduler_warmup_steps,
            "num_vqvae_training_steps": self.n_vqvae_training_steps,
        }

    @property
    def observation_deltas(self) -> list[int]:
        return list(range(1 - self.n_obs_steps, 1))

    @property
    def chunks(self) -> int:
        """Number of chunks predicted per sample: one per observation, and the future ones."""
        return self.n_obs_steps + self.n_action_pred_token - 1

    def view_images(self, images: Tensor, camera: str, noise: NoiseSource | None = None) -> Tensor:
        random = noise if self.crop_is_random else None
        return resize_and_crop(images, None, self.crop, random).unflatten(0, images.shape[:-3])

    @property
    def action_deltas(self) -> list[int]:
        first = 1 - self.n_obs_steps
        return list(range(first, first + self.chunks + self.action_chunk_size - 1))

    @property
    def action_steps(self) -> int:
        return self.action_chunk_size

    @property
    def uses_all_parameters(self) -> bool:
        return False  # each phase trains only a part of the policy
