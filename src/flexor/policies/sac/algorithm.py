"""SAC's losses and its update: critics, the gripper's critic, the actor, the temperature, the averages of the critics.

Names and losses are LeRobot's. docs/rl.md lists where the update differs from LeRobot's, and why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexor.core.rng import NoiseSource
from flexor.policies.sac.networks import CriticEnsemble, CriticHead, Observation, SACEncoder
from flexor.policies.sac.policy import SAC
from flexor.policies.sac.settings import SACSettings


class TransitionBatch(NamedTuple):
    """What was observed, done and received: processed as the policy gets it."""

    state: Observation
    action: Tensor  # [B, A], in [-1, 1]; with a gripper, its choice is the last number
    reward: Tensor  # [B]
    next_state: Observation
    done: Tensor  # [B], 1 where the episode ended for good: no reward follows. Not where time was up
    penalty: Tensor | None = None  # [B], added to the reward of what the gripper chose


class SACAlgorithm(nn.Module):
    """All that is learned besides the policy itself. Its `state_dict` is LeRobot's `algorithm/model.safetensors`."""

    def __init__(self, policy: SAC, settings: SACSettings):
        super().__init__()
        self._policy = [policy]  # in a list: it is no part of this module
        config = policy.config
        values = settings.with_preset()
        self.settings: dict[str, Any] = values
        network = settings.critic_network_kwargs
        layers = network.hidden_dims, network.activate_final, network.final_activation
        inputs = policy.encoder_critic.output_dim + config.action.shape[0]
        self.critic_ensemble = CriticEnsemble(settings.num_critics, inputs, layers)
        self.critic_target = CriticEnsemble(settings.num_critics, inputs, layers).requires_grad_(False)
        self.critic_target.load_state_dict(self.critic_ensemble.state_dict())
        self.discrete_critic_target: CriticHead | None = None
        if policy.discrete_critic is not None:
            assert config.num_discrete_actions is not None
            gripper = config.discrete_critic_network_kwargs
            layers = gripper.hidden_dims, gripper.activate_final, gripper.final_activation
            target = CriticHead(policy.encoder_critic.output_dim, config.num_discrete_actions, layers)
            self.discrete_critic_target = target.requires_grad_(False)
            target.load_state_dict(_heads(policy.discrete_critic))
        self.log_alpha = nn.Parameter(torch.tensor([math.log(values["temperature_init"])]))
        actions = config.action.shape[0] + (policy.discrete_critic is not None)
        entropy = values["target_entropy"]
        self.target_entropy: float = -actions / 2 if entropy is None else entropy
        self.optimizers: dict[str, torch.optim.Adam] = {}

    @property
    def policy(self) -> SAC:
        return self._policy[0]

    def make_optimizers(self) -> dict[str, torch.optim.Adam]:
        """Adam for each part. The encoder is in one of them only, that of the critics."""
        rates = self.settings
        fused: dict[str, Any] = {"fused": True, "capturable": self.log_alpha.is_cuda}
        groups = {
            "critic": (self.critic_parameters(), rates["critic_lr"]),
            "actor": (self.actor_parameters(), rates["actor_lr"]),
            "temperature": ([self.log_alpha], rates["temperature_lr"]),
        }
        if self.policy.discrete_critic is not None:
            groups["discrete_critic"] = (self.gripper_parameters(), rates["critic_lr"])
        self.optimizers = {
            name: torch.optim.Adam(params, lr=lr, **fused) for name, (params, lr) in groups.items()
        }
        return self.optimizers

    def critic_parameters(self) -> list[nn.Parameter]:
        return [*self.critic_ensemble.parameters(), *_trained(self.policy.encoder_critic)]

    def actor_parameters(self) -> list[nn.Parameter]:
        policy = self.policy
        encoder = [] if policy.config.shared_encoder else _trained(policy.encoder_actor)
        return [*policy.actor.head_parameters(), *encoder]

    def gripper_parameters(self) -> list[nn.Parameter]:
        assert self.policy.discrete_critic is not None
        return [p for n, p in self.policy.discrete_critic.named_parameters() if not n.startswith("encoder.")]

    def update(self, batches: Sequence[TransitionBatch], noise: NoiseSource, step: int) -> dict[str, Tensor]:
        """One update of all parts, number `step`: the critics learn from each batch, the actor from the last one."""
        figures: dict[str, Tensor] = {}
        batches = [self._encoded_once(batch) for batch in batches]
        for number, batch in enumerate(batches):
            if number:
                self.update_targets()
            figures |= self._update_critics(batch, noise, f"{number}/")
        every = self.settings["policy_update_freq"]
        for number in range(every if step % every == 0 else 0):
            figures |= self._update_actor(batches[-1], noise, f"{number}/")
        self.update_targets()
        return figures

    @torch.no_grad()
    def _encoded_once(self, batch: TransitionBatch) -> TransitionBatch:
        """The features of a frozen image encoder are the same for all parts that share it."""
        encoder = self.policy.encoder_critic
        if not (encoder.frozen and self.policy.config.shared_encoder):
            return batch
        state, next_state = (encoder.with_image_features(each) for each in (batch.state, batch.next_state))
        return batch._replace(state=state, next_state=next_state)

    def _update_critics(self, batch: TransitionBatch, noise: NoiseSource, name: str) -> dict[str, Tensor]:
        """The gripper's critic learns at the same time: the encoder gets the sum of both gradients."""
        policy = self.policy
        encoded = self._encode(policy.encoder_critic, batch.state, noise, f"{name}state")
        next_encoded, next_acting = self._next(batch, noise, name)
        loss, values = self._critic_loss(batch, encoded, next_encoded, next_acting, noise, name)
        figures = {"critic_loss": loss.detach(), "q": values.detach().mean()}
        total = loss
        if policy.discrete_critic is not None:
            gripper_loss = self._discrete_critic_loss(batch, encoded, next_encoded)
            figures["discrete_critic_loss"] = gripper_loss.detach()
            total = loss + gripper_loss
        for part in ("critic", "discrete_critic"):
            if part in self.optimizers:
                self.optimizers[part].zero_grad()
        total.backward()
        figures["critic_grad_norm"] = self._step_optimizer("critic")
        if policy.discrete_critic is not None:
            figures["discrete_critic_grad_norm"] = self._step_optimizer("discrete_critic")
        return figures

    def _update_actor(self, batch: TransitionBatch, noise: NoiseSource, name: str) -> dict[str, Tensor]:
        encoded = self._encode_for_actor(batch, noise, f"{name}actor")
        loss, entropy = self._actor_loss(*encoded, noise, f"{name}actor")
        self.optimizers["actor"].zero_grad()
        loss.backward(inputs=self.trained_by("actor"))  # through the critics, not to them
        norm = self._step_optimizer("actor")
        if not self.policy.config.shared_encoder:  # the step has changed the actor's encoder
            encoded = self._encode_for_actor(batch, noise, f"{name}temperature")
        temperature_loss = self._temperature_loss(encoded[1], noise, f"{name}temperature")
        self.optimizers["temperature"].zero_grad()
        temperature_loss.backward()
        self._step_optimizer("temperature")
        return {
            "actor_loss": loss.detach(),
            "actor_grad_norm": norm,
            "entropy": entropy.detach(),
            "temperature_loss": temperature_loss.detach(),
            "temperature": self.log_alpha.detach().exp()[0],
        }

    def trained_by(self, part: str) -> list[Tensor]:
        """Those that a part's optimizer trains. To walk through the modules takes longer than to compute with them."""
        parameters: list[Tensor] = self.optimizers[part].param_groups[0]["params"]
        return parameters

    @torch.no_grad()
    def _step_optimizer(self, part: str) -> Tensor:
        """The norm of the gradients, before they are clipped."""
        gradients = [p.grad for p in self.trained_by(part) if p.grad is not None]
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        torch._foreach_mul_(gradients, (self.settings["grad_clip_norm"] / (norm + 1e-6)).clamp(max=1))
        self.optimizers[part].step()
        return norm

    def critic_loss(self, batch: TransitionBatch, noise: NoiseSource, name: str = "0/") -> Tensor:
        """The sum over the critics of their mean squared errors."""
        encoded = self._encode(self.policy.encoder_critic, batch.state, noise, f"{name}state")
        return self._critic_loss(batch, encoded, *self._next(batch, noise, name), noise, name)[0]

    def discrete_critic_loss(self, batch: TransitionBatch, noise: NoiseSource, name: str = "0/") -> Tensor:
        """The mean squared error of the value of what the gripper did."""
        encoded = self._encode(self.policy.encoder_critic, batch.state, noise, f"{name}state")
        return self._discrete_critic_loss(batch, encoded, self._next(batch, noise, name)[0])

    @torch.no_grad()
    def _next(self, batch: TransitionBatch, noise: NoiseSource, name: str) -> tuple[Tensor, Tensor]:
        """What the critics and the actor see of the next observation. It is the same if they share an encoder."""
        policy = self.policy
        encoded = self._encode(policy.encoder_critic, batch.next_state, noise, f"{name}next")
        if policy.config.shared_encoder:
            return encoded, encoded
        return encoded, self._encode(policy.encoder_actor, batch.next_state, noise, f"{name}next actor")

    def _critic_loss(
        self,
        batch: TransitionBatch,
        encoded: Tensor,
        next_encoded: Tensor,
        next_acting: Tensor,
        noise: NoiseSource,
        name: str,
    ) -> tuple[Tensor, Tensor]:
        continuous = self.policy.config.action.shape[0]
        with torch.no_grad():
            action, log_density = self.policy.actor.sample(
                next_acting, self._normal(f"{name}next action", next_acting, noise)
            )
            values = self.critic_target(next_encoded, action)
            value = self._subset(values, noise, name).min(0).values
            if self.settings["use_backup_entropy"]:
                value = value - self.log_alpha.exp() * log_density
            target = batch.reward + (1 - batch.done) * self.settings["discount"] * value
        predicted = self.critic_ensemble(encoded, batch.action[:, :continuous])  # [E, B]
        return (predicted - target).square().mean(1).sum(), predicted

    def _subset(self, values: Tensor, noise: NoiseSource, name: str) -> Tensor:
        """The values [E, B] of some of the critics, chosen at random."""
        count = self.settings["num_subsample_critics"]
        if count is None:
            return values
        order = noise.for_batch().uniform(f"{name}critics", (1, len(values)))[0].argsort()
        return values[order[:count].to(values.device)]

    def _discrete_critic_loss(self, batch: TransitionBatch, encoded: Tensor, next_encoded: Tensor) -> Tensor:
        critic, target_critic = self.policy.discrete_critic, self.discrete_critic_target
        assert critic is not None and target_critic is not None
        choice = batch.action[:, -1:].round().long()
        with torch.no_grad():
            best = critic(next_encoded).argmax(-1, keepdim=True)
            value = target_critic(next_encoded).gather(1, best)[:, 0]
            reward = batch.reward if batch.penalty is None else batch.reward + batch.penalty
            target = reward + (1 - batch.done) * self.settings["discount"] * value
        predicted: Tensor = critic(encoded).gather(1, choice)[:, 0]
        return (predicted - target).square().mean()

    def actor_loss(self, batch: TransitionBatch, noise: NoiseSource, name: str = "0/actor") -> Tensor:
        """Gradients flow to a shared encoder from the critics' loss only."""
        return self._actor_loss(*self._encode_for_actor(batch, noise, name), noise, name)[0]

    def temperature_loss(
        self, batch: TransitionBatch, noise: NoiseSource, name: str = "0/temperature"
    ) -> Tensor:
        return self._temperature_loss(self._encode_for_actor(batch, noise, name)[1], noise, name)

    def _encode_for_actor(
        self, batch: TransitionBatch, noise: NoiseSource, name: str
    ) -> tuple[Tensor, Tensor]:
        """What the critics and the actor see of an observation; only an encoder of the actor's own gets gradients."""
        policy = self.policy
        with torch.no_grad():
            encoded = self._encode(policy.encoder_critic, batch.state, noise, name)
        if policy.config.shared_encoder:
            return encoded, encoded
        return encoded, self._encode(policy.encoder_actor, batch.state, noise, f"{name} own encoder")

    def _actor_loss(
        self, encoded: Tensor, acting: Tensor, noise: NoiseSource, name: str
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the entropy of the actions."""
        action, log_density = self.policy.actor.sample(acting, self._normal(f"{name} action", acting, noise))
        value = self.critic_ensemble(encoded, action).min(0).values
        alpha = self.log_alpha.detach().exp()
        return (alpha * log_density - value).mean(), -log_density.mean()

    def _temperature_loss(self, acting: Tensor, noise: NoiseSource, name: str) -> Tensor:
        with torch.no_grad():
            _, log_density = self.policy.actor.sample(acting, self._normal(f"{name} action", acting, noise))
        return (-self.log_alpha.exp() * (log_density + self.target_entropy)).mean()

    @torch.no_grad()
    def update_targets(self) -> None:
        """The targets are averages of the critics. The encoder is not averaged: it is theirs, too."""
        torch._foreach_lerp_(*self._averaged, self.settings["critic_target_update_weight"])

    @cached_property
    def _averaged(self) -> tuple[list[Tensor], list[Tensor]]:
        """The averages, and what they follow."""
        targets: list[Tensor] = [*self.critic_target.parameters()]
        current: list[Tensor] = [*self.critic_ensemble.parameters()]
        if self.discrete_critic_target is not None:
            assert self.policy.discrete_critic is not None
            heads = dict(self.policy.discrete_critic.named_parameters())
            for name, target in self.discrete_critic_target.named_parameters():
                targets.append(target)
                current.append(heads[name])
        return targets, current

    def _encode(self, encoder: SACEncoder, observation: Observation, noise: NoiseSource, name: str) -> Tensor:
        encoded: Tensor = encoder(observation, noise if self.training else None, name)
        return encoded

    def _normal(self, name: str, like: Tensor, noise: NoiseSource) -> Tensor:
        return noise.normal(name, (len(like), self.policy.config.action.shape[0])).to(like.device)


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def _heads(critic: CriticHead) -> dict[str, Tensor]:
    """A gripper critic's weights without its encoder's."""
    return {n: value for n, value in critic.state_dict().items() if not n.startswith("encoder.")}
