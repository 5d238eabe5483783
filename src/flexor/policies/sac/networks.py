"""The networks of SAC: encoders of observations, the Gaussian actor, and critics. Parameter names are LeRobot's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.core.batch import ENV_STATE, IMAGE_FEATURES, STATE
from flexor.core.rng import NoiseSource
from flexor.policies.nn.resnet10 import ResNet10, SpatialEmbedding, drop
from flexor.policies.sac.config import SACConfig

DROPOUT = 0.1  # of what is kept of each image, in training
Observation = Mapping[str, Tensor]


class MLP(nn.Module):
    """Linear layers, each normalised and activated; the last one only if `activate_final`."""

    def __init__(
        self,
        inputs: int,
        hidden_dims: Sequence[int],
        activate_final: bool = True,
        final_activation: str | None = None,
    ):
        super().__init__()
        layers: list[nn.Module] = []
        sizes = [inputs, *hidden_dims]
        for number, (before, after) in enumerate(zip(sizes, hidden_dims)):
            layers.append(nn.Linear(before, after))
            is_last = number + 1 == len(hidden_dims)
            if not is_last or activate_final:
                named = final_activation if is_last and final_activation else "SiLU"
                layers += [nn.LayerNorm(after), getattr(nn, named)()]
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            # the same as `layer(x)`, without what a call of a module costs: more than such a small layer itself
            if isinstance(layer, nn.Linear):
                x = F.linear(x, layer.weight, layer.bias)
            elif isinstance(layer, nn.LayerNorm):
                x = torch.layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps)
            else:
                x = layer(x)
        return x


class SmallConvolutions(nn.Module):
    """Images [B, C, H, W] -> feature maps of a sixteenth of their size."""

    def __init__(self, channels: int, hidden: int):
        super().__init__()
        layers: list[nn.Module] = []
        for size in (7, 5, 3, 3):
            layers += [nn.Conv2d(channels, hidden, size, stride=2), nn.ReLU()]
            channels = hidden
        self.image_enc_layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.image_enc_layers(images)
        return out


class PretrainedConvolutions(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.image_enc_layers = ResNet10(channels)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.image_enc_layers(images)
        return out


class SACEncoder(nn.Module):
    """An observation -> one vector: of the cameras, the environment's state and the state, in this order."""

    def __init__(self, config: SACConfig):
        super().__init__()
        self.cameras = list(config.images)
        self.frozen = config.vision_encoder_name is not None and config.freeze_vision_encoder
        latent, inputs = config.latent_dim, config.input_features
        if self.cameras:
            self._add_cameras(config)
        if ENV_STATE in inputs:
            self.env_encoder = _projection(inputs[ENV_STATE].shape[0], latent)
        if STATE in inputs:
            self.state_encoder = _projection(inputs[STATE].shape[0], latent)
        parts = len(self.cameras) + (ENV_STATE in inputs) + (STATE in inputs)
        self.output_dim = parts * latent

    def _add_cameras(self, config: SACConfig) -> None:
        shape = config.images[self.cameras[0]].shape
        if config.vision_encoder_name is None:
            self.image_encoder: nn.Module = SmallConvolutions(shape[0], config.image_encoder_hidden_dim)
        else:
            self.image_encoder = PretrainedConvolutions(shape[0])
        self.image_encoder.requires_grad_(not self.frozen)
        weight = next(self.image_encoder.parameters())
        with torch.no_grad():
            maps = self.image_encoder(torch.zeros(1, *shape, device=weight.device))
        pooled, (channels, height, width) = config.image_embedding_pooling_dim, maps.shape[1:]
        self.spatial_embeddings = nn.ModuleDict(
            {_module_name(key): SpatialEmbedding(channels, height, width, pooled) for key in self.cameras}
        )
        self.post_encoders = nn.ModuleDict(
            {
                # the first one is the place of the dropout, which `forward` computes
                _module_name(key): nn.Sequential(
                    nn.Identity(), *_projection(channels * pooled, config.latent_dim)
                )
                for key in self.cameras
            }
        )

    def with_image_features(self, observation: Observation) -> Observation:
        """The observation with the feature maps of each camera, which `forward` then takes."""
        if not self.cameras or IMAGE_FEATURES + self.cameras[0] in observation:
            return observation
        maps = self.image_encoder(torch.cat([observation[key] for key in self.cameras]))
        chunks = maps.chunk(len(self.cameras))
        return {**observation, **{IMAGE_FEATURES + key: each for key, each in zip(self.cameras, chunks)}}

    def forward(self, observation: Observation, noise: NoiseSource | None = None, name: str = "") -> Tensor:
        """[B, output_dim]. With `noise`, a part of what is kept of images is dropped, as in training."""
        parts, observation = [], self.with_image_features(observation)
        for key in self.cameras:
            x = self.spatial_embeddings[_module_name(key)](observation[IMAGE_FEATURES + key])
            if noise is not None:
                x = drop(x, DROPOUT, noise, f"{name}/dropout/{key}")
            parts.append(self.post_encoders[_module_name(key)](x))
        if hasattr(self, "env_encoder"):
            parts.append(self.env_encoder(observation[ENV_STATE]))
        if hasattr(self, "state_encoder"):
            parts.append(self.state_encoder(observation[STATE]))
        return torch.cat(parts, -1)


def _projection(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.LayerNorm(outputs), nn.Tanh())


def _module_name(key: str) -> str:
    return key.replace(".", "_")  # a module's name has no dots


class GaussianActor(nn.Module):
    """What is encoded of an observation -> mean and standard deviation of a Gaussian, whose tanh is the action."""

    def __init__(self, config: SACConfig, encoder: SACEncoder):
        super().__init__()
        self.encoder = encoder
        network, head = config.actor_network_kwargs, config.policy_kwargs
        self.network = MLP(encoder.output_dim, network.hidden_dims, network.activate_final)
        width, actions = network.hidden_dims[-1], config.action.shape[0]
        self.mean_layer, self.std_layer = nn.Linear(width, actions), nn.Linear(width, actions)
        for layer in (self.mean_layer, self.std_layer):
            nn.init.uniform_(layer.weight, -head.init_final, head.init_final)
            nn.init.uniform_(layer.bias, -head.init_final, head.init_final)
        self.variance_range = head.std_min, head.std_max

    def forward(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.network(encoded)
        # LeRobot's layer is named after the deviation, but gives the logarithm of the variance
        variance = self.std_layer(hidden).exp().clamp(*self.variance_range)
        return self.mean_layer(hidden), variance.sqrt()

    def sample(self, encoded: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [B, A] and the logarithms of their densities [B], for standard normal noise [B, A]."""
        mean, std = self(encoded)
        before = mean + std * noise
        gaussian = -0.5 * noise.square() - std.log() - 0.5 * math.log(2 * math.pi)
        # log(1 - tanh(x)^2), exact where tanh is almost 1
        tanh_slope = 2 * (math.log(2) - before - F.softplus(-2 * before))
        return before.tanh(), (gaussian - tanh_slope).sum(-1)

    def head_parameters(self) -> list[nn.Parameter]:
        """Those of the actor alone, without the encoder's."""
        return [*self.network.parameters(), *self.mean_layer.parameters(), *self.std_layer.parameters()]


class CriticHead(nn.Module):
    def __init__(self, inputs: int, outputs: int, settings: tuple[Sequence[int], bool, str | None]):
        super().__init__()
        self.net = MLP(inputs, *settings)
        self.output_layer = nn.Linear(settings[0][-1], outputs)
        nn.init.orthogonal_(self.output_layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output_layer(self.net(x))
        return out


class CriticEnsemble(nn.Module):
    """The value of an action, as several critics estimate it: [B, F], [B, A] -> [E, B]."""

    def __init__(self, count: int, inputs: int, settings: tuple[Sequence[int], bool, str | None]):
        super().__init__()
        self.critics = nn.ModuleList(CriticHead(inputs, 1, settings) for _ in range(count))

    def forward(self, encoded: Tensor, actions: Tensor) -> Tensor:
        x = torch.cat([encoded, actions], -1)
        return torch.stack([critic(x)[:, 0] for critic in self.critics])


class DiscreteCritic(CriticHead):
    """The value of each choice of the gripper: [B, F] -> [B, N]."""

    def __init__(self, config: SACConfig, encoder: SACEncoder):
        network = config.discrete_critic_network_kwargs
        assert config.num_discrete_actions is not None
        settings = network.hidden_dims, network.activate_final, network.final_activation
        super().__init__(encoder.output_dim, config.num_discrete_actions, settings)
        self.encoder = encoder
