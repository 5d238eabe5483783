"""The settings of ACT, under LeRobot's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from flexor.core.batch import ENV_STATE
from flexor.core.errors import ConfigError
from flexor.policies.base import MOST_DROPOUT, Calibration, ChunkConfig
from flexor.policies.features import Kind, Normalization

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


@dataclass
class ACTConfig(ChunkConfig):
    """Defaults are those of the paper's bimanual tasks, as LeRobot sets them."""

    type: ClassVar[str] = "act"
    trains_in_bf16: ClassVar[bool] = True
    calibration = Calibration()

    chunk_size: int = 100
    n_action_steps: int = 100
    normalization_mapping: dict[Kind, Normalization] = field(
        default_factory=lambda: {Kind.VISUAL: "MEAN_STD", Kind.STATE: "MEAN_STD", Kind.ACTION: "MEAN_STD"}
    )
    vision_backbone: str = "resnet18"
    """The ResNet that encodes each camera: resnet18, 34, 50, 101 or 152."""
    pretrained_backbone_weights: str | None = "ResNet18_Weights.IMAGENET1K_V1"
    """ImageNet weights to initialise the backbone with; null for random weights."""
    replace_final_stride_with_dilation: bool = False
    """Keep twice the resolution in the last stage (ResNet-50 and deeper)."""
    pre_norm: bool = False
    """Normalise before each transformer sub-layer instead of after it."""
    dim_model: int = 512
    """Width of the transformer."""
    n_heads: int = 8
    """Attention heads."""
    dim_feedforward: int = 3200
    """Width inside the feed-forward layers."""
    feedforward_activation: str = "relu"
    """relu or gelu."""
    n_encoder_layers: int = 4
    """Layers of the encoder over the observations."""
    n_decoder_layers: int = 1
    """Layers of the action decoder (the original code always uses one, whatever its setting)."""
    use_vae: bool = True
    """Train with the variational objective."""
    latent_dim: int = 32
    """Size of the latent style variable."""
    n_vae_encoder_layers: int = 4
    """Layers of the encoder over the true actions."""
    temporal_ensemble_coeff: float | None = None
    """Predict at every step, and average overlapping chunks with weights exp(-c i); the paper uses c = 0.01."""
    dropout: float = 0.1
    """Dropout in the transformers."""
    kl_weight: float = 10.0
    """Weight of the KL divergence in the loss."""
    optimizer_lr: float = 1e-5
    """Learning rate (--optimizer.lr takes precedence)."""
    optimizer_weight_decay: float = 1e-4
    """Weight decay (--optimizer.weight_decay takes precedence)."""
    optimizer_lr_backbone: float = 1e-5
    """Learning rate of the image backbone."""

    def validate(self) -> None:
        super().validate()
        self.require(1, "dim_model", "n_heads", "dim_feedforward", "latent_dim")
        self.require(0, "dropout", high=MOST_DROPOUT)
        if self.temporal_ensemble_coeff is not None and self.n_action_steps != 1:
            raise ConfigError(
                f"policy.temporal_ensemble_coeff predicts at every step, so policy.n_action_steps must "
                f"be 1, not {self.n_action_steps}."
            )
        if self.feedforward_activation not in ACTIVATIONS:
            raise ConfigError(
                f"policy.feedforward_activation={self.feedforward_activation!r} must be one of "
                f"{', '.join(ACTIVATIONS)}."
            )
        if self.dim_model % (2 * self.n_heads):
            raise ConfigError(
                f"policy.dim_model={self.dim_model} must be a multiple of 2 x policy.n_heads={self.n_heads}."
            )
        if self.input_features and not self.images and not self.environment_state:
            raise self.missing_input(f"a camera (observation.image...) or {ENV_STATE}")

    @property
    def ensemble_coefficient(self) -> float | None:
        return self.temporal_ensemble_coeff

    def optimizer_preset(self) -> dict[str, Any]:
        return {
            "type": "adamw",
            "lr": self.optimizer_lr,
            "weight_decay": self.optimizer_weight_decay,
            "grad_clip_norm": 10.0,
        }

    @property
    def computes_with_bf16_copies(self) -> bool:
        # cameras of different sizes go through the backbone one after the other
        return len({camera.shape for camera in self.images.values()}) < 2
