"""The settings of TD-MPC, under LeRobot's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from flexor.core.batch import ENV_STATE, STATE
from flexor.core.errors import ConfigError
from flexor.policies.base import Calibration, PolicyConfig
from flexor.policies.features import Kind, Normalization


@dataclass
class TDMPCConfig(PolicyConfig):
    """Defaults are those of FOWM's xArm tasks, as LeRobot sets them."""

    type: ClassVar[str] = "tdmpc"
    calibration = Calibration(cameras=1, height=84, width=84)

    n_action_repeats: int = 2
    """How often the plan's first action is executed before the policy looks again; 1 with n_action_steps."""
    horizon: int = 5
    """How many steps the model is trained over and the search looks ahead."""
    n_action_steps: int = 1
    """How many actions of a plan are executed; more than one needs n_action_repeats=1 and use_mpc."""
    normalization_mapping: dict[Kind, Normalization] = field(
        default_factory=lambda: {
            Kind.VISUAL: "IDENTITY",
            Kind.STATE: "IDENTITY",
            Kind.ENV: "IDENTITY",
            Kind.ACTION: "MIN_MAX",
        }
    )
    """How each kind of feature is normalised; actions must be in [-1, 1], so MIN_MAX."""
    image_encoder_hidden_dim: int = 32
    """Channels of the convolutions that encode the camera."""
    state_encoder_hidden_dim: int = 256
    """Width of the networks that encode states."""
    latent_dim: int = 50
    """Size of the latent."""
    q_ensemble_size: int = 5
    """How many critics there are; their disagreement says where the model is unsure."""
    mlp_dim: int = 512
    """Width of dynamics, reward, policy, critics and value."""
    discount: float = 0.9
    """How much a reward one step later is worth."""
    use_mpc: bool = True
    """Search for actions; otherwise the learned policy acts alone, which is cheap and weaker."""
    cem_iterations: int = 6
    """Rounds of the search."""
    max_std: float = 2.0
    """Spread of the actions tried in the first round, and the most in any."""
    min_std: float = 0.05
    """The least spread; also what the learned policy's proposals are shaken by."""
    n_gaussian_samples: int = 512
    """Sequences tried per round."""
    n_pi_samples: int = 51
    """Sequences that the learned policy proposes."""
    uncertainty_regularizer_coeff: float = 1.0
    """How much the critics' disagreement counts against a sequence."""
    n_elites: int = 50
    """How many of the best sequences the next round is drawn around."""
    elite_weighting_temperature: float = 0.5
    """How much more the better ones of them count; 0 is not at all."""
    gaussian_mean_momentum: float = 0.1
    """How much of the last round's mean is kept."""
    max_random_shift_ratio: float = 0.0476
    """Pictures are shifted by up to this share of their size in training; 0 is not at all."""
    reward_coeff: float = 0.5
    """Weight of the error of predicted rewards."""
    expectile_weight: float = 0.9
    """How optimistic the value is: 0.5 is the mean over the recorded actions, 1 the best of them."""
    value_coeff: float = 0.1
    """Weight of the critics' and of the value's errors."""
    consistency_coeff: float = 20.0
    """Weight of the error of predicted latents."""
    advantage_scaling: float = 3.0
    """How strongly the learned policy prefers recorded actions that were better than expected."""
    pi_coeff: float = 0.5
    """Weight of the learned policy's error."""
    temporal_decay_coeff: float = 0.5
    """How much less each further step counts in the loss."""
    target_model_momentum: float = 0.995
    """How much of the slowly moving target model is kept per optimizer step."""
    optimizer_lr: float = 3e-4
    """Learning rate (--optimizer.lr takes precedence)."""

    def validate(self) -> None:
        self._check_numbers()
        self._check_features()
        if self.n_obs_steps != 1:
            raise ConfigError(
                f"policy.n_obs_steps={self.n_obs_steps}: TD-MPC sees one observation; set it to 1."
            )
        if self.normalization_mapping.get(Kind.ACTION) != "MIN_MAX":
            raise ConfigError(
                f"policy.normalization_mapping.ACTION={self.normalization_mapping.get(Kind.ACTION)}: TD-MPC "
                "searches for actions in [-1, 1], so it must be MIN_MAX."
            )
        if self.n_action_steps > 1 and (self.n_action_repeats != 1 or not self.use_mpc):
            raise ConfigError(
                f"policy.n_action_steps={self.n_action_steps} executes several actions of a plan, which needs "
                f"policy.n_action_repeats=1 (it is {self.n_action_repeats}) and policy.use_mpc=true."
            )
        if self.n_action_steps > self.horizon:
            raise ConfigError(
                f"policy.n_action_steps={self.n_action_steps} is more than policy.horizon={self.horizon}: "
                "only planned actions can be executed."
            )

    def _check_numbers(self) -> None:
        sizes = ("image_encoder_hidden_dim", "state_encoder_hidden_dim", "latent_dim", "mlp_dim")
        counts = ("horizon", "n_action_steps", "n_action_repeats", "q_ensemble_size", "cem_iterations")
        self.require(1, *sizes, *counts, "n_gaussian_samples", "n_elites")
        self.require(0, "n_pi_samples", "min_std", "uncertainty_regularizer_coeff", "max_random_shift_ratio")
        shares = ("discount", "expectile_weight", "target_model_momentum", "gaussian_mean_momentum")
        self.require(0, *shares, high=1)
        if self.min_std > self.max_std:
            raise ConfigError(f"policy.min_std={self.min_std} is more than policy.max_std={self.max_std}.")
        if self.n_elites > (tried := self.n_gaussian_samples + self.n_pi_samples):
            raise ConfigError(
                f"policy.n_elites={self.n_elites} is more than the {tried} sequences that are tried "
                "(policy.n_gaussian_samples and policy.n_pi_samples)."
            )
        if self.use_mpc and self.q_ensemble_size == 1 and self.uncertainty_regularizer_coeff > 0:
            raise ConfigError(
                "policy.q_ensemble_size=1: a single critic can't disagree; use 2 or more, or set "
                "policy.uncertainty_regularizer_coeff=0."
            )

    def _check_features(self) -> None:
        if self.input_features and not self.observed:
            raise ConfigError(
                f"TD-MPC needs a camera (observation.image...), {STATE} or {ENV_STATE}; the dataset has "
                f"{', '.join(self.input_features)}."
            )
        if len(self.images) > 1:
            raise ConfigError(
                f"TD-MPC looks through one camera, but there are {', '.join(self.images)}: leave one of them "
                "in policy.input_features."
            )
        for name, feature in self.images.items():
            if feature.shape[-1] != feature.shape[-2]:
                raise ConfigError(
                    f"{name} is {list(feature.shape[-2:])}, but TD-MPC's pictures must be square: resize them, "
                    "for example with --dataset.cache.size=64x64."
                )

    def optimizer_preset(self) -> dict[str, Any]:
        return {"type": "adam", "lr": self.optimizer_lr}

    @property
    def moves_weights(self) -> bool:
        return True  # the target model's

    @property
    def observation_deltas(self) -> list[int]:
        return list(range(self.horizon + 1))

    @property
    def action_deltas(self) -> list[int]:
        return list(range(self.horizon))

    @property
    def reward_deltas(self) -> list[int]:
        return list(range(self.horizon))

    @property
    def action_steps(self) -> int:
        return self.n_action_repeats if self.n_action_repeats > 1 else self.n_action_steps
