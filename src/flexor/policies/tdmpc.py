"""TD-MPC: plan in a learned model of the task (Hansen et al. 2022, https://arxiv.org/abs/2203.04955).

Observations become a small latent, in which the model predicts what an action leads to, what reward it
brings and what may still come after it; acting is a search in that model (`blocks/mppi.py`). It learns
from recorded rewards as FOWM does (Feng et al. 2023, https://arxiv.org/abs/2310.16029), which never asks
critics about actions that nobody took. The only policy here that can become better than its data; in
return the data needs rewards, and a decision costs thousands of small predictions.

Parameter names and settings are LeRobot's, so checkpoints go both ways. Unlike there, pictures are shifted
in training whatever their camera is called, and a policy may see a picture or a state alone.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from flexor.batch import ACTION, ENV_STATE, MEMORY, REWARD, STATE, Batch
from flexor.errors import ConfigError
from flexor.policies.base import (
    Kind,
    Loss,
    NoiseSource,
    Normalization,
    ParamGroup,
    Policy,
    PolicyConfig,
    PolicyFeature,
)
from flexor.policies.blocks.latent_world import LatentWorld
from flexor.policies.blocks.mppi import lower_of_two, plan
from flexor.policies.blocks.vision import random_crop
from flexor.tensors import local

LARGEST_PREFERENCE = 100.0  # for an action that turned out better than expected


@dataclass
class TDMPCConfig(PolicyConfig):
    """Defaults are those of FOWM's xArm tasks, as LeRobot sets them."""

    type: ClassVar[str] = "tdmpc"

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


class Targets(NamedTuple):
    """What the model should have predicted, without gradients."""

    latents: Tensor  # [B, H, L], after each action
    critics: Tensor  # [B, H]
    value: Tensor  # [B, H]
    preference: Tensor  # [B, H]: how much an action is worth imitating


class TDMPC(Policy):
    Config = TDMPCConfig
    config: TDMPCConfig

    def __init__(self, config: TDMPCConfig):
        super().__init__(config)
        self.model = LatentWorld(config)
        self.model_target = deepcopy(self.model).requires_grad_(False)

    @torch.no_grad()
    def begin_step(self, step: int) -> None:
        """The target follows what the last optimizer step made of the model."""
        if step > 0:
            pairs = list(zip(self.model_target.parameters(), self.model.parameters(), strict=True))
            targets, own = [local(t) for t, _ in pairs], [local(p) for _, p in pairs]
            torch._foreach_lerp_(targets, own, 1 - self.config.target_model_momentum)

    def loss(self, batch: Batch, noise: NoiseSource) -> Loss:
        config, model = self.config, self.model
        actions, rewards = batch[ACTION], batch[REWARD]  # [B, H, A], [B, H]
        observed = {key: batch[key] for key in config.observed}  # [B, H + 1, ...]
        observed |= {key: self._shift(observed[key], noise) for key in config.images}
        first = {key: value[:, 0] for key, value in observed.items()}
        following = {key: value[:, 1:] for key, value in observed.items()}

        latents, predicted_rewards = model.imagine(model.encode(first), actions)  # [B, H + 1, L], [B, H]
        starts = latents[:, :-1]
        critics, value = model.values(starts, actions), model.value(starts)  # [B, H, E], [B, H]
        imitated = model.act(starts.detach())  # [B, H, A]
        target = self._targets(following, starts, actions, rewards, value, noise)

        known, followed, rewarded = self._valid(batch)
        surprise = target.value - value
        expectile = torch.where(surprise > 0, config.expectile_weight, 1 - config.expectile_weight)
        errors = {
            "consistency_loss": _squares(latents[:, 1:], target.latents).mean(-1) * followed,
            "reward_loss": _squares(predicted_rewards, rewards) * rewarded,
            "Q_value_loss": _squares(critics, target.critics[..., None]).sum(-1) * (followed & rewarded),
            "V_value_loss": expectile * surprise.square(),
            # a mean over time, as in the paper's code; the others are sums
            "pi_loss": target.preference * _squares(imitated, actions).sum(-1) / config.horizon,
        }
        decay = config.temporal_decay_coeff ** torch.arange(config.horizon, device=actions.device)
        parts = {name: (decay * error * known).sum(1) for name, error in errors.items()}
        total = (
            config.consistency_coeff * parts["consistency_loss"]
            + config.reward_coeff * parts["reward_loss"]
            + config.value_coeff * (parts["Q_value_loss"] + parts["V_value_loss"])
            + config.pi_coeff * parts["pi_loss"]
        )
        return Loss(total, {**parts, "Q": critics.mean((1, 2)), "V": value.mean(1)})

    @torch.no_grad()
    def _targets(
        self,
        following: dict[str, Tensor],
        starts: Tensor,
        actions: Tensor,
        rewards: Tensor,
        value: Tensor,
        noise: NoiseSource,
    ) -> Targets:
        config = self.config
        believed = self.model_target.values(starts, actions)  # [B, H, E]
        advantage = lower_of_two(believed, noise, "critics/advantage") - value
        return Targets(
            latents=self.model_target.encode(following),
            # of recorded actions alone, and by the model itself, not by its target: as FOWM does it
            critics=rewards + config.discount * self.model.value(self.model.encode(following)),
            value=lower_of_two(believed, noise, "critics/value"),
            preference=(config.advantage_scaling * advantage).exp().clamp(max=LARGEST_PREFERENCE),
        )

    def _shift(self, pictures: Tensor, noise: NoiseSource) -> Tensor:
        """Each picture of [B, T, C, S, S] moved by a few pixels of its own; the border is repeated."""
        steps, size = pictures.shape[1], (pictures.shape[-2], pictures.shape[-1])
        pad = round(self.config.max_random_shift_ratio * size[0])
        if pad == 0:
            return pictures
        moved = [
            random_crop(pictures[:, t : t + 1], size, noise, f"shift/{t}", border=pad) for t in range(steps)
        ]
        return torch.cat(moved, 1)

    def _valid(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Steps [B, H] that start and act within the episode, whose next observation does, whose reward does."""
        key = STATE if STATE in self.config.observed else next(iter(self.config.observed))
        seen = ~batch[f"{key}_is_pad"]  # [B, H + 1]
        return seen[:, :1] & ~batch[f"{ACTION}_is_pad"], seen[:, 1:], ~batch[f"{REWARD}_is_pad"]

    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        """Actions [B, n, A] for now: a plan's first ones, or its first one n times."""
        config, memory = self.config, batch.get(MEMORY, {})
        latent = self.model.encode({k: _now(batch[k], feature) for k, feature in config.observed.items()})
        if config.use_mpc:
            actions, memory["plan"] = plan(self.model, config, latent, noise, memory.get("plan"))
        else:
            actions = self.model.act(latent)[:, None]
        if config.n_action_repeats > 1:
            actions = actions[:, :1].expand(-1, config.n_action_repeats, -1)
        return actions[:, : config.action_steps].clamp(-1, 1)

    def shard_units(self) -> list[nn.Module]:
        return [*self.model.networks(), *self.model_target.networks()]

    def param_groups(self) -> list[ParamGroup]:
        # with the target, which gets no gradient: LeRobot's optimizer numbers its parameters too
        return [ParamGroup(list(self.parameters()))]


def _now(observed: Tensor, feature: PolicyFeature) -> Tensor:
    """[B, ...] of an observation that may have a time dimension."""
    return observed[:, 0] if observed.dim() > 1 + len(feature.shape) else observed


def _squares(predicted: Tensor, target: Tensor) -> Tensor:
    return (predicted - target).square()
