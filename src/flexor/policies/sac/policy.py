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
from flexor.core.model_files import ModelFiles
from flexor.core.rng import NoiseSource
from flexor.core.run_files import WEIGHTS
from flexor.core.weight_files import WeightFiles
from flexor.policies.base import Loss, Policy
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
        label = f"policy.vision_encoder_name={name}"
        folder = ModelFiles(name, label).folder([WEIGHTS])
        for encoder in {self.encoder_critic, self.encoder_actor}:
            assert isinstance(encoder.image_encoder, PretrainedConvolutions)
            weights = encoder.image_encoder.image_enc_layers.state_dict()
            files = WeightFiles(folder)
            described = files.described()
            if wrong := [key for key, value in weights.items() if _shape(described.get(key)) != value.shape]:
                raise ConfigError(
                    f"{label} is not a ResNet-10 like lerobot/resnet10: {wrong[0]} is missing or of another shape. "
                    "Use that one, or null for convolutions that are trained with the policy."
                )
            files.fill(weights)

    def shard_units(self) -> list[nn.Module]:
        return []


def _shape(tensor: Tensor | None) -> torch.Size | None:
    return None if tensor is None else tensor.shape
