"""TD-MPC's model of the task in a small latent space, for training and planning.

Names and order of parameters are LeRobot's. All methods accept any leading dimensions, so that training over
time and planning over samples use the same methods.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.core.batch import ENV_STATE, STATE
from flexor.policies.nn.first_convolution import FirstConv2d
from flexor.policies.tdmpc.config import TDMPCConfig

KERNELS = (7, 5, 3, 3)  # of the camera's convolutions, each with a stride of 2


class LatentWorld(nn.Module):
    """Encoder, dynamics, reward, policy, critics and value. Their names are LeRobot's, as is their order."""

    def __init__(self, config: TDMPCConfig):
        super().__init__()
        actions, latent, width = config.action.shape[0], config.latent_dim, config.mlp_dim
        self._encoder = LatentEncoder(config)
        self._dynamics = nn.Sequential(
            *_mlp(latent + actions, width, latent), nn.LayerNorm(latent), nn.Sigmoid()
        )
        self._reward = nn.Sequential(*_mlp(latent + actions, width, 1))
        self._pi = nn.Sequential(*_mlp(latent, width, actions))
        self._Qs = nn.ModuleList(_critic(latent + actions, width) for _ in range(config.q_ensemble_size))
        self._V = _critic(latent, width)
        self._initialize()

    def _initialize(self) -> None:
        """Orthogonal weights, zero biases. Rewards and critics start at zero, so that no value is overestimated."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                gain = nn.init.calculate_gain("relu") if isinstance(module, nn.Conv2d) else 1.0
                nn.init.orthogonal_(module.weight, gain)
                assert module.bias is not None
                nn.init.zeros_(module.bias)
        for network in (self._reward, *self._Qs):
            last = list(network.children())[-1]
            assert isinstance(last, nn.Linear)
            nn.init.zeros_(last.weight)

    def networks(self) -> list[nn.Module]:
        return [self._encoder, self._dynamics, self._reward, self._pi, *self._Qs, self._V]

    def encode(self, observed: dict[str, Tensor]) -> Tensor:
        """Observations [..., *shape] -> latent [..., L]."""
        return self._encoder(observed)

    def step(self, latent: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """The next latent [..., L] and the reward [...]."""
        x = torch.cat([latent, action], -1)
        return self._dynamics(x), self._reward(x).squeeze(-1).float()

    def imagine(self, latent: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [B, H + 1, L], the first being `latent`, and rewards [B, H] of a sequence of actions [B, H, A]."""
        latents, rewards = [latent], []
        for action in actions.unbind(1):
            latent, reward = self.step(latent, action)
            latents.append(latent)
            rewards.append(reward)
        return torch.stack(latents, 1), torch.stack(rewards, 1)

    def act(self, latent: Tensor) -> Tensor:
        return self._pi(latent).float().tanh()

    def value(self, latent: Tensor) -> Tensor:
        return self._V(latent).squeeze(-1).float()

    def values(self, latent: Tensor, action: Tensor) -> Tensor:
        """The value of an action by each critic [..., E]."""
        x = torch.cat([latent, action], -1)
        return torch.cat([critic(x) for critic in self._Qs], -1).float()


class LatentEncoder(nn.Module):
    """Encodes the camera and each state to a latent; the result is their mean."""

    def __init__(self, config: TDMPCConfig):
        super().__init__()
        self.camera = next(iter(config.images), None)
        latent, width = config.latent_dim, config.state_encoder_hidden_dim
        if self.camera is not None:
            channels, size, _ = config.images[self.camera].shape
            self.upscale = upscale_factor(size)
            self.image_enc_layers = _image_network(
                channels, size * self.upscale, config.image_encoder_hidden_dim, latent
            )
        if config.state:
            self.state_enc_layers = _state_network(config.state.shape[0], width, latent)
        if config.environment_state:
            self.env_state_enc_layers = _state_network(config.environment_state.shape[0], width, latent)

    def forward(self, observed: dict[str, Tensor]) -> Tensor:
        latents = []
        if self.camera is not None:
            images = observed[self.camera]  # [..., C, S, S]
            flat = images.flatten(0, -4)
            if self.upscale > 1:
                flat = F.interpolate(flat, scale_factor=float(self.upscale), mode="nearest")
            latents.append(self.image_enc_layers(flat).unflatten(0, images.shape[:-3]))
        if ENV_STATE in observed:
            latents.append(self.env_state_enc_layers(observed[ENV_STATE]))
        if STATE in observed:
            latents.append(self.state_enc_layers(observed[STATE]))
        return torch.stack(latents).mean(0)


def upscale_factor(size: int) -> int:
    """The factor by which an image is enlarged, so that the convolutions leave at least one pixel.

    It is above 1 below 39 pixels, which LeRobot does not support.
    """
    return next(factor for factor in range(1, 40) if _output_size(factor * size) >= 1)


def _output_size(size: int) -> int:
    for kernel in KERNELS:
        size = (size - kernel) // 2 + 1
    return size


def _image_network(channels: int, size: int, width: int, latent: int) -> nn.Sequential:
    layers: list[nn.Module] = [FirstConv2d(channels, width, padding=0, bias=True), nn.ReLU(inplace=True)]
    for kernel in KERNELS[1:]:
        layers += [nn.Conv2d(width, width, kernel, stride=2), nn.ReLU(inplace=True)]
    pixels = _output_size(size) ** 2
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(width * pixels, latent), nn.LayerNorm(latent), nn.Sigmoid()
    )


def _state_network(size: int, width: int, latent: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(size, width), nn.ELU(), nn.Linear(width, latent), nn.LayerNorm(latent), nn.Sigmoid()
    )


def _mlp(inputs: int, width: int, outputs: int) -> list[nn.Module]:
    return [
        *(nn.Linear(inputs, width), nn.LayerNorm(width), nn.Mish()),
        *(nn.Linear(width, width), nn.LayerNorm(width), nn.Mish()),
        nn.Linear(width, outputs),
    ]


def _critic(inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.LayerNorm(width), nn.Tanh()),
        *(nn.Linear(width, width), nn.ELU(), nn.Linear(width, 1)),
    )
