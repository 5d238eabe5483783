"""The optimizers that several of LeRobot's policies share, and the schedule of its large ones."""

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass
class AdamSettings:
    optimizer_type: ClassVar[str] = "adam"

    optimizer_lr: float = 1e-4
    """Learning rate (--optimizer.lr takes precedence)."""
    optimizer_betas: tuple[float, float] = (0.95, 0.999)
    """Adam's betas (--optimizer.betas takes precedence)."""
    optimizer_eps: float = 1e-8
    """Adam's epsilon (--optimizer.eps takes precedence)."""
    optimizer_weight_decay: float = 1e-6
    """Weight decay (--optimizer.weight_decay takes precedence)."""

    def optimizer_preset(self) -> dict[str, Any]:
        return {
            "type": self.optimizer_type,
            "lr": self.optimizer_lr,
            "betas": self.optimizer_betas,
            "eps": self.optimizer_eps,
            "weight_decay": self.optimizer_weight_decay,
            "grad_clip_norm": 10.0,
        }


@dataclass
class FineTuningSettings(AdamSettings):
    """AdamW, and a learning rate that warms up and then falls along a cosine. Policies have defaults of their own."""

    optimizer_type: ClassVar[str] = "adamw"

    optimizer_betas: tuple[float, float] = (0.9, 0.95)
    optimizer_weight_decay: float = 1e-10
    optimizer_grad_clip_norm: float = 10.0
    """Limit of the gradient's norm (--optimizer.grad_clip_norm takes precedence)."""
    scheduler_warmup_steps: int = 1_000
    """Warm-up steps until the full learning rate (--scheduler.num_warmup_steps takes precedence)."""
    scheduler_decay_steps: int = 30_000
    """Steps until the lowest learning rate (--scheduler.num_decay_steps takes precedence); scaled down if the run is
    shorter."""
    scheduler_decay_lr: float = 2.5e-6
    """The lowest learning rate (--scheduler.decay_lr takes precedence)."""

    def optimizer_preset(self) -> dict[str, Any]:
        return super().optimizer_preset() | {"grad_clip_norm": self.optimizer_grad_clip_norm}

    def scheduler_preset(self) -> dict[str, Any]:
        return {
            "type": "cosine_decay_with_warmup",
            "num_warmup_steps": self.scheduler_warmup_steps,
            "num_decay_steps": self.scheduler_decay_steps,
            "peak_lr": self.optimizer_lr,
            "decay_lr": self.scheduler_decay_lr,
        }
