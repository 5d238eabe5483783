"""The optimizer that LeRobot's diffusion policies and its VQ-BeT share."""

from dataclasses import dataclass
from typing import Any


@dataclass
class AdamSettings:
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
            "type": "adam",
            "lr": self.optimizer_lr,
            "betas": self.optimizer_betas,
            "eps": self.optimizer_eps,
            "weight_decay": self.optimizer_weight_decay,
            "grad_clip_norm": 10.0,
        }
