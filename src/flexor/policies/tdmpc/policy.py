"""TD-MPC: plan in a learned model of the task (Hansen et al. 2022, https://arxiv.org/abs/2203.04955).

Observations are encoded into a small latent state. From it and an action, the model predicts the next latent
state, the reward and the value. At inference the policy plans in that model (`mppi.py`). It learns from
recorded rewards as FOWM does (Feng et al. 2023, https://arxiv.org/abs/2310.16029): critics are trained on
recorded actions only. It is the only built-in policy that can become better than its data. In return the data
needs rewards, and a decision costs thousands of small predictions.

Parameter names and settings are LeRobot's, so either program can load the other's checkpoints. Unlike in LeRobot,
images are shifted in training whatever the camera's name, and a policy may use an image or a state alone.
"""

from __future__ import annotations

from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flexor.core.batch import ACTION, MEMORY, REWARD, STATE, Batch
from flexor.core.rng import NoiseSource
from flexor.core.tensors import local
from flexor.policies.base import Loss, Policy
from flexor.policies.features import PolicyFeature
from flexor.policies.tdmpc.config import TDMPCConfig
from flexor.policies.tdmpc.mppi import lower_of_two, plan
from flexor.policies.tdmpc.world_model import LatentWorld

LARGEST_PREFERENCE = 100.0  # for an action that turned out better than expected


class Targets(NamedTuple):
    """The targets of the model's predictions, without gradients."""

    latents: Tensor  # [B, H, L], after each action
    critics: Tensor  # [B, H]
    value: Tensor  # [B, H]
    preference: Tensor  # [B, H]: how much an action is worth imitating


class TDMPC(Policy):
    Config = TDMPCConfig
    optimizes_frozen = True  # the target model
    config: TDMPCConfig

    def __init__(self, config: TDMPCConfig):
        super().__init__(config)
        self.model = LatentWorld(config)
        self.model_target = deepcopy(self.model).requires_grad_(False)

    @torch.no_grad()
    def begin_step(self, step: int) -> None:
        """Move the target model towards the model after the last optimizer step."""
        if step > 0:
            pairs = list(zip(self.model_target.parameters(), self.model.parameters(), strict=True))
            targets, params = [local(t) for t, _ in pairs], [local(p) for _, p in pairs]
            torch._foreach_lerp_(targets, params, 1 - self.config.target_model_momentum)

    def graph_key(self) -> str:
        return "step"

    def loss(self, batch: Batch, noise: NoiseSource) -> Loss:
        config, model = self.config, self.model
        actions, rewards = batch[ACTION], batch[REWARD]  # [B, H, A], [B, H]
        observed = {key: batch[key] for key in config.observed}  # [B, H + 1, ...]
        observed |= {key: config.view_images(observed[key], key, noise) for key in config.images}
        first = {key: value[:, 0] for key, value in observed.items()}
        following = {key: value[:, 1:].contiguous() for key, value in observed.items()}  # for two models

        latents, predicted_rewards = model.imagine(model.encode(first), actions)  # [B, H + 1, L], [B, H]
        starts = latents[:, :-1]
        critics, value = model.values(starts, actions), model.value(starts)  # [B, H, E], [B, H]
        policy_actions = model.act(starts.detach())  # [B, H, A]
        target = self._targets(following, starts, actions, rewards, value, noise)

        step_mask, next_mask, reward_mask = self._valid(batch)
        value_error = target.value - value
        expectile = torch.where(value_error > 0, config.expectile_weight, 1 - config.expectile_weight)
        errors = {
            "consistency_loss": _squared_error(latents[:, 1:], target.latents).mean(-1) * next_mask,
            "reward_loss": _squared_error(predicted_rewards, rewards) * reward_mask,
            "Q_value_loss": _squared_error(critics, target.critics[..., None]).sum(-1)
            * (next_mask & reward_mask),
            "V_value_loss": expectile * value_error.square(),
            # a mean over time, as in the paper's code; the others are sums
            "pi_loss": target.preference * _squared_error(policy_actions, actions).sum(-1) / config.horizon,
        }
        decay = config.temporal_decay_coeff ** torch.arange(config.horizon, device=actions.device)
        parts = {name: (decay * error * step_mask).sum(1) for name, error in errors.items()}
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
        q_values = self.model_target.values(starts, actions)  # [B, H, E]
        advantage = lower_of_two(q_values, noise, "critics/advantage") - value
        return Targets(
            latents=self.model_target.encode(following),
            # for recorded actions only, and from the model, not the target model: as in FOWM
            critics=rewards + config.discount * self.model.value(self.model.encode(following)),
            value=lower_of_two(q_values, noise, "critics/value"),
            preference=(config.advantage_scaling * advantage).exp().clamp(max=LARGEST_PREFERENCE),
        )

    def _valid(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Masks [B, H] of steps within the episode: by start and action, by next observation, by reward."""
        key = STATE if STATE in self.config.observed else next(iter(self.config.observed))
        valid = ~batch[f"{key}_is_pad"]  # [B, H + 1]
        return valid[:, :1] & ~batch[f"{ACTION}_is_pad"], valid[:, 1:], ~batch[f"{REWARD}_is_pad"]

    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        """Actions [B, n, A]: the first n of a plan, or its first one n times."""
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


def _now(observed: Tensor, feature: PolicyFeature) -> Tensor:
    """The current observation [B, ...]; the input may have a time dimension."""
    return observed[:, 0] if observed.dim() > 1 + len(feature.shape) else observed


def _squared_error(predicted: Tensor, target: Tensor) -> Tensor:
    return (predicted - target).square()
