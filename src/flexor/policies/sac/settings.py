"""How SAC learns: the settings `--rl.*` of the algorithm, and their presets."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from flexor.core.errors import ConfigError
from flexor.core.typed import setting
from flexor.policies.sac.config import CriticNetwork

Preset = Literal["hilserl", "lerobot"]
PRESETS: dict[str, dict[str, Any]] = {
    # of HIL-SERL's code, not of LeRobot's version of it
    "hilserl": {"discount": 0.97, "use_backup_entropy": False, "temperature_init": 0.01, "utd_ratio": 2},
    "lerobot": {"discount": 0.99, "use_backup_entropy": True, "temperature_init": 1.0, "utd_ratio": 1},
}


@dataclass(frozen=True)
class SACSettings:
    """Names are those of LeRobot's `algorithm.*`."""

    preset: Preset = "hilserl"
    """Where settings that are not given come from: HIL-SERL's code, or LeRobot's version of it."""
    discount: float | None = setting(None, at_least=0, less_than=1)
    """Discount factor of rewards per step; default: 0.97 (hilserl), 0.99 (lerobot)."""
    use_backup_entropy: bool | None = None
    """Whether the value of a state includes the entropy of the actions there; default: false (hilserl), true
    (lerobot)."""
    temperature_init: float | None = setting(None, more_than=0)
    """Initial weight of the entropy; default: 0.01 (hilserl), 1 (lerobot)."""
    utd_ratio: int | None = setting(None, at_least=1)
    """Updates of the critics per update of the actor; default: 2 (hilserl), 1 (lerobot)."""
    target_entropy: float | None = None
    """Entropy that the temperature aims at; default: minus half the number of actions."""
    num_critics: int = setting(2, at_least=1)
    """Number of critics."""
    num_subsample_critics: int | None = setting(None, at_least=1)
    """Number of critics, chosen at random, whose minimum is the target; default: all."""
    critic_target_update_weight: float = setting(0.005, more_than=0)
    """Share of the critics in each update of their moving averages, which are the targets."""
    policy_update_freq: int = setting(1, at_least=1)
    """The actor is updated this many times in every so many updates."""
    actor_lr: float = setting(3e-4, more_than=0)
    """Learning rate of the actor."""
    critic_lr: float = setting(3e-4, more_than=0)
    """Learning rate of the critics and of the encoder."""
    temperature_lr: float = setting(3e-4, more_than=0)
    """Learning rate of the temperature."""
    grad_clip_norm: float = setting(40.0, more_than=0)
    """Clip the gradients of the actor, the critics and the temperature to this norm each."""
    critic_network_kwargs: CriticNetwork = field(default_factory=CriticNetwork)
    """The layers of a critic."""

    def with_preset(self) -> dict[str, Any]:
        """All settings by name, those that are not given by the preset's."""
        values = {each.name: getattr(self, each.name) for each in fields(SACSettings)}
        preset = PRESETS[self.preset]
        return {name: preset.get(name) if value is None else value for name, value in values.items()}

    def check_algorithm(self) -> None:
        if self.num_subsample_critics is not None and self.num_subsample_critics > self.num_critics:
            raise ConfigError(
                f"rl.num_subsample_critics={self.num_subsample_critics} is more than rl.num_critics={self.num_critics}."
            )
