"""SAC: soft actor-critic (Haarnoja et al. 2018, https://arxiv.org/abs/1801.01290), as HIL-SERL uses it on robots.

The policy is the part that acts: encoders, a Gaussian actor, and, for a gripper that opens and closes, a critic of its
few choices (Luo et al. 2024, https://arxiv.org/abs/2410.21845). It learns from rewards while it acts: see
`algorithm.py`, and `flexor.rl` for the run. Parameter names and settings are those of LeRobot's `gaussian_actor`, so
either program can load the other's checkpoints. Unlike LeRobot's, it acts without noise outside of training.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flexor.core.batch import Batch
from flexor.core.errors import ConfigError
from flexor.core.rng import NoiseSource
from flexor.policies.base import Loss, Policy
from flexor.policies.nn.resnet10 import load_resnet10
from flexor.policies.sac.config import SACConfig
from flexor.policies.sac.networks import DiscreteCritic, GaussianActor, PretrainedConvolutions, SACEncoder


class SAC(Policy):
    Config = SACConfig
    config: SACConfig

    def __init__(self, config: SACConfig):
        super().__init__(config)
        self.encoder_critic = SACEncoder(config)
        self.encoder_actor = self.encoder_critic if config.shared_encoder else SACEncoder(config)
        self.actor = GaussianActor(config, self.encoder_actor)
        self.discrete_critic = (
            None if config.num_discrete_actions is None else DiscreteCritic(config, self.encoder_critic)
        )

    def loss(self, batch: Batch, noise: NoiseSource) -> Loss:
        raise ConfigError(
            "policy.type=sac learns from rewards while it acts: `flexor train --policy.type=sac --env.type=...` trains "
            "it. It has no loss on a dataset, and `flexor plan` does not plan it yet."
        )

    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        """The most likely action [B, 1, A], without noise; with a gripper, its best choice is the last number."""
        mean, _ = self.actor(self.encoder_actor(batch))
        return self._with_gripper(mean.tanh(), batch)[:, None]

    def explore(self, batch: Batch, noise: NoiseSource) -> Tensor:
        """A random action [B, A], as in training."""
        encoded = self.encoder_actor(batch)
        shape = len(encoded), self.config.action.shape[0]
        action, _ = self.actor.sample(encoded, noise.normal("action", shape).to(encoded.device))
        return self._with_gripper(action, batch)

    def _with_gripper(self, action: Tensor, batch: Batch) -> Tensor:
        if self.discrete_critic is None:
            return action
        choice = self.discrete_critic(self.encoder_critic(batch)).argmax(-1, keepdim=True)
        return torch.cat([action, choice.to(action.dtype)], -1)

    def load_backbone(self) -> None:
        name = self.config.vision_encoder_name
        if name is None or not self.config.images:
            return
        for encoder in {self.encoder_critic, self.encoder_actor}:
            assert isinstance(encoder.image_encoder, PretrainedConvolutions)
            load_resnet10(encoder.image_encoder.image_enc_layers, "policy.vision_encoder_name", name)

    def shard_units(self) -> list[nn.Module]:
        return []
