"""The settings of TD-MPC, under LeRobot's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from flexor.core.batch import ENV_STATE, STATE
from flexor.core.errors import ConfigError
from flexor.core.rng import NoiseSource
from flexor.policies.base import Calibration, PolicyConfig
from flexor.policies.features import Kind, Normalization
from flexor.policies.nn.camera import random_crop


@dataclass
class TDMPCConfig(PolicyConfig):
    """Defaults are those of FOWM's xArm tasks, as LeRobot sets them."""

    type: ClassVar[str] = "tdmpc"
    trains_in_bf16: ClassVar[bool] = False  # targets add up rounding errors
    calibration = Calibration(cameras=1, height=84, width=84)

    n_action_repeats: int = 2
    """Times the first action of a plan is repeated before the next plan; must be 1 if n_action_steps is above 1."""
    horizon: int = 5
    """Number of steps the model is trained over and the planner looks ahead."""
    n_action_steps: int = 1
    """Number of actions of a plan that are executed; more than one requires n_action_repeats=1 and use_mpc=true."""
    normalization_mapping: dict[Kind, Normalization] = field(
        default_factory=lambda: {
            Kind.VISUAL: "IDENTITY",
            Kind.STATE: "IDENTITY",
            Kind.ENV: "IDENTITY",
            Kind.ACTION: "MIN_MAX",
        }
    )
    """How each kind of feature is normalised; ACTION must be MIN_MAX, since actions must be in [-1, 1]."""
    image_encoder_hidden_dim: int = 32
    """Channels of the convolutions that encode the camera."""
    state_encoder_hidden_dim: int = 256
    """Width of the networks that encode states."""
    latent_dim: int = 50
    """Size of the latent state."""
    q_ensemble_size: int = 5
    """Number of critics; their disagreement shows where the model is uncertain."""
    mlp_dim: int = 512
    """Width of the dynamics, reward, policy, critic and value networks."""
    discount: float = 0.9
    """Discount factor of rewards per step."""
    use_mpc: bool = True
    """Plan actions with the model; false uses the learned policy alone, which is cheaper and weaker."""
    cem_iterations: int = 6
    """Iterations of the planner."""
    max_std: float = 2.0
    """Standard deviation of sampled actions in the first iteration, and its maximum in the others."""
    min_std: float = 0.05
    """Minimum standard deviation of sampled actions; also that of the noise added to the learned policy's proposals."""
    n_gaussian_samples: int = 512
    """Action sequences sampled per iteration."""
    n_pi_samples: int = 51
    """Action sequences that the learned policy proposes."""
    uncertainty_regularizer_coeff: float = 1.0
    """Weight of the penalty for disagreement of the critics about a sequence."""
    n_elites: int = 50
    """Number of best sequences (elites) that the next iteration is sampled around."""
    elite_weighting_temperature: float = 0.5
    """How much more weight the better elites get; 0 weights all elites equally."""
    gaussian_mean_momentum: float = 0.1
    """Fraction of the previous iteration's mean that is kept."""
    max_random_shift_ratio: float = 0.0476
    """In training, images are shifted randomly by up to this fraction of their size; 0 disables shifts."""
    reward_coeff: float = 0.5
    """Weight of the reward prediction error in the loss."""
    expectile_weight: float = 0.9
    """How optimistic the value function is: 0.5 is the mean over the recorded actions, 1 the best of them."""
    value_coeff: float = 0.1
    """Weight of the errors of the critics and of the value function in the loss."""
    consistency_coeff: float = 20.0
    """Weight of the latent prediction error in the loss."""
    advantage_scaling: float = 3.0
    """How strongly the learned policy prefers recorded actions that were better than expected."""
    pi_coeff: float = 0.5
    """Weight of the learned policy's error in the loss."""
    temporal_decay_coeff: float = 0.5
    """Factor by which the weight of each further step in the loss decreases."""
    target_model_momentum: float = 0.995
    """Fraction of the target model that is kept in each of its updates, one per optimizer step."""
    optimizer_lr: float = 3e-4
    """Learning rate (--optimizer.lr takes precedence)."""

    def validate(self) -> None:
        self._check_numbers()
        self._check_features()
        self.check_one_observation()
        if self.normalization_mapping.get(Kind.ACTION) != "MIN_MAX":
            raise ConfigError(
                f"policy.normalization_mapping.ACTION={self.normalization_mapping.get(Kind.ACTION)}: TD-MPC "
                "plans actions in [-1, 1], so it must be MIN_MAX."
            )
        if self.n_action_steps > 1 and (self.n_action_repeats != 1 or not self.use_mpc):
            raise ConfigError(
                f"policy.n_action_steps={self.n_action_steps} executes several actions of a plan, which requires "
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
        fractions = ("discount", "expectile_weight", "target_model_momentum", "gaussian_mean_momentum")
        self.require(0, *fractions, high=1)
        if self.min_std > self.max_std:
            raise ConfigError(f"policy.min_std={self.min_std} is more than policy.max_std={self.max_std}.")
        if self.n_elites > (candidates := self.n_gaussian_samples + self.n_pi_samples):
            raise ConfigError(
                f"policy.n_elites={self.n_elites} is more than the {candidates} sequences of an iteration "
                "(policy.n_gaussian_samples and policy.n_pi_samples)."
            )
        if self.use_mpc and self.q_ensemble_size == 1 and self.uncertainty_regularizer_coeff > 0:
            raise ConfigError(
                "policy.q_ensemble_size=1: uncertainty is the disagreement of several critics; use 2 or more, or set "
                "policy.uncertainty_regularizer_coeff=0."
            )

    def _check_features(self) -> None:
        if self.input_features and not self.observed:
            raise self.missing_input(f"a camera (observation.image...), {STATE} or {ENV_STATE}")
        if len(self.images) > 1:
            raise ConfigError(
                f"TD-MPC supports one camera only, but there are {', '.join(self.images)}: keep one of them "
                "in policy.input_features."
            )
        for name, feature in self.images.items():
            if feature.shape[-1] != feature.shape[-2]:
                raise ConfigError(
                    f"{name} is {list(feature.shape[-2:])}, but TD-MPC requires square images: resize them, "
                    "for example with --dataset.cache.size=64x64."
                )

    def view_images(self, images: Tensor, camera: str, noise: NoiseSource | None = None) -> Tensor:
        """Shifted by a few pixels in training, each image of [B, T, C, S, S] independently; the border is repeated."""
        size = images.shape[-2], images.shape[-1]
        pad = round(self.max_random_shift_ratio * size[0])
        if pad == 0 or noise is None:
            return images
        return random_crop(images, size, noise, "shift", pad, together=False).contiguous()

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
