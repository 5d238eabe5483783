"""Common code of policies that turn noise into a chunk of actions, with any network.

A chunk starts at the oldest observation, so its first actions are in the past; those from now on are executed.
All actions are predicted at once, conditioned on one vector of the observations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from flexor.core.batch import ACTION, STATE, Batch
from flexor.core.errors import ConfigError
from flexor.core.rng import NoiseSource
from flexor.policies.base import Loss, Policy, PolicyConfig, action_padding, mean_over_valid
from flexor.policies.features import Kind, Normalization
from flexor.policies.nn.adam import AdamSettings
from flexor.policies.nn.diffusion import DiffusionSettings, Network


class Objective(Protocol):
    """How noise is turned into actions: `DiffusionSchedule`, `FlowMatching`."""

    def error(self, network: Network, clean: Tensor, noise: NoiseSource) -> Tensor:
        """The squared error [B, H, A] of what the network predicts for actions [B, H, A] with noise."""

    def sample(self, network: Network, shape: Sequence[int], noise: NoiseSource, like: Tensor) -> Tensor:
        """Actions of `shape` [B, H, A] from pure noise, on the device of `like`."""


@dataclass
class DenoisingConfig(AdamSettings, DiffusionSettings, PolicyConfig):
    """The settings of these policies, under LeRobot's names."""

    n_obs_steps: int = 2
    horizon: int = 64
    """Number of actions predicted at once, starting at the oldest observation."""
    n_action_steps: int = 32
    """Number of actions that are executed before the next prediction, starting at the current step."""
    normalization_mapping: dict[Kind, Normalization] = field(
        default_factory=lambda: {Kind.VISUAL: "MEAN_STD", Kind.STATE: "MIN_MAX", Kind.ACTION: "MIN_MAX"}
    )
    do_mask_loss_for_padding: bool = False
    """Ignore actions beyond the end of an episode in the loss."""
    scheduler_name: str = "cosine"
    """Learning-rate schedule: cosine, constant or constant_with_warmup (--scheduler.type takes precedence)."""
    scheduler_warmup_steps: int = 0
    """Warm-up steps until the full learning rate (--scheduler.num_warmup_steps takes precedence)."""

    def validate(self) -> None:
        self.require(1, "n_obs_steps", "horizon", "n_action_steps")
        self.require(0, "scheduler_warmup_steps")
        future = self.horizon - self.n_obs_steps + 1
        if self.n_action_steps > future:
            raise ConfigError(
                f"policy.n_action_steps={self.n_action_steps} is more than policy.horizon - policy.n_obs_steps "
                f"+ 1 = {future}: only predicted actions from the current step on can be executed."
            )
        self._check_inputs()

    def _check_inputs(self) -> None:
        if self.input_features and not self.state:
            raise self.missing_input(STATE)
        shapes = {key: camera.shape for key, camera in self.images.items()}
        if len(set(shapes.values())) > 1:
            listed = ", ".join(f"{key} {list(shape)}" for key, shape in shapes.items())
            raise ConfigError(f"{self.type} requires cameras of one size, but there are {listed}.")

    def scheduler_preset(self) -> dict[str, Any]:
        if self.scheduler_name == "constant":
            return {"type": "constant"}
        return {"type": self.scheduler_name, "num_warmup_steps": self.scheduler_warmup_steps}

    @property
    def observation_deltas(self) -> list[int]:
        return list(range(1 - self.n_obs_steps, 1))

    @property
    def action_deltas(self) -> list[int]:
        first = 1 - self.n_obs_steps
        return list(range(first, first + self.horizon))

    @property
    def action_steps(self) -> int:
        return self.n_action_steps


class DenoisingPolicy(Policy):
    """Subclasses define `observe` and `denoise`; the rest is here."""

    config: DenoisingConfig
    objective: Objective

    def observe(self, batch: Batch, noise: NoiseSource) -> Tensor:
        """One vector of the observations of all time steps: [B, C]."""
        raise NotImplementedError

    def denoise(self, x: Tensor, level: Tensor, observed: Tensor) -> Tensor:
        """A noisy chunk [B, H, A], its noise level or time [B], the observations -> [B, H, A]."""
        raise NotImplementedError

    def loss(self, batch: Batch, noise: NoiseSource) -> Loss:
        network = partial(self.denoise, observed=self.observe(batch, noise))
        error = self.objective.error(network, batch[ACTION], noise)
        if self.config.do_mask_loss_for_padding:
            return Loss(mean_over_valid(error, action_padding(batch), batch), {})
        return Loss(error.mean((1, 2)), {})

    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        observed = self.observe(batch, noise)
        shape = (len(observed), self.config.horizon, self.config.action.shape[0])
        network = partial(self.denoise, observed=observed)
        chunk = self.objective.sample(network, shape, noise, batch[STATE])
        return chunk[:, self.config.n_obs_steps - 1 :]
