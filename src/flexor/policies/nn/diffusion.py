"""Diffusion: noise is added to actions in training, and removed step by step at inference.

DDPM (Ho et al. 2020, https://arxiv.org/abs/2006.11239) adds fresh noise at every denoising step.
DDIM (Song et al. 2021, https://arxiv.org/abs/2010.02502) adds none, and needs only a tenth of the steps.
The values are those of `diffusers`, computed in float32 as there: 1 - a / b loses digits, and a more
exact computation would give different values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.core.errors import ConfigError
from flexor.core.rng import NoiseSource

CHOICES = {
    "noise_scheduler_type": ("DDPM", "DDIM"),
    "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2"),
    "prediction_type": ("epsilon", "sample"),
}

# noisy x [B, H, A], its noise level or time [B] -> the prediction that the objective trains, [B, H, A]
Network = Callable[[Tensor, Tensor], Tensor]


@dataclass
class DiffusionSettings:
    """The settings of every diffusion policy, under LeRobot's names."""

    noise_scheduler_type: str = "DDPM"
    """How noise is removed at inference: DDPM, or DDIM, which needs fewer steps."""
    num_train_timesteps: int = 100
    """Number of noise levels."""
    beta_schedule: str = "squaredcos_cap_v2"
    """How noise increases with the level: linear, scaled_linear or squaredcos_cap_v2 (a squared cosine)."""
    beta_start: float = 0.0001
    """Noise added at the first level (linear and scaled_linear)."""
    beta_end: float = 0.02
    """Noise added at the last level (linear and scaled_linear)."""
    prediction_type: str = "epsilon"
    """What the network predicts: the noise (epsilon) or the actions (sample)."""
    clip_sample: bool = True
    """Clip the predicted actions at each denoising step to policy.clip_sample_range (in normalised units)."""
    clip_sample_range: float = 1.0
    """Largest absolute value of a normalised action, with policy.clip_sample."""
    num_inference_steps: int | None = None
    """Denoising steps at inference, evenly spaced over the levels; by default all levels."""

    def check_diffusion(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"policy.{name}={getattr(self, name)!r} must be one of {', '.join(choices)}."
                )
        if self.num_train_timesteps < 1:
            raise ConfigError(f"policy.num_train_timesteps={self.num_train_timesteps} must be at least 1.")
        steps = self.num_inference_steps
        if steps is not None and not 1 <= steps <= self.num_train_timesteps:
            raise ConfigError(
                f"policy.num_inference_steps={steps} must be from 1 to policy.num_train_timesteps="
                f"{self.num_train_timesteps}: the network is trained on these noise levels only."
            )
        if not 0 < self.beta_start <= self.beta_end < 1:
            raise ConfigError(
                f"policy.beta_start={self.beta_start} and policy.beta_end={self.beta_end} must be between "
                "0 and 1, the start no larger than the end."
            )
        if self.clip_sample_range <= 0:
            raise ConfigError(f"policy.clip_sample_range={self.clip_sample_range} must be more than 0.")


class DiffusionSchedule:
    """The signal at each noise level; adds noise and removes it."""

    def __init__(self, settings: DiffusionSettings):
        self.settings = settings
        self.signal = torch.cumprod(1 - betas(settings), 0)  # [T]; actions are scaled by its square root
        self._signals: dict[torch.device, Tensor] = {}

    def levels(self) -> list[int]:
        """The noise levels used at inference, from the highest to 0."""
        steps = self.settings.num_inference_steps or self.settings.num_train_timesteps
        stride = self.settings.num_train_timesteps // steps
        return [stride * i for i in reversed(range(steps))]

    def add_noise(self, clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """clean and noise [B, ...], level [B] -> clean with noise, [B, ...]."""
        signal = self._signal_on(clean.device)[level].view(-1, *[1] * (clean.dim() - 1))
        return signal.sqrt() * clean + (1 - signal).sqrt() * noise

    def _signal_on(self, device: torch.device) -> Tensor:
        """Copied once: a step that copies from the host can't be captured in a CUDA graph."""
        if device not in self._signals:
            self._signals[device] = self.signal.to(device, non_blocking=True)
        return self._signals[device]

    def error(self, network: Network, clean: Tensor, noise: NoiseSource) -> Tensor:
        """The squared error [B, H, A] of what the network predicts for actions [B, H, A] with noise."""
        epsilon = noise.normal("noise", tuple(clean.shape)).to(clean)
        count = self.settings.num_train_timesteps
        level = noise.integers("timestep", (len(clean),), count).to(clean.device)
        predicted = network(self.add_noise(clean, epsilon, level), level)
        target = epsilon if self.settings.prediction_type == "epsilon" else clean
        return F.mse_loss(predicted, target, reduction="none")

    def sample(self, network: Network, shape: Sequence[int], noise: NoiseSource, like: Tensor) -> Tensor:
        """Actions of `shape` [B, H, A] from pure noise, on the device of `like`."""
        x = noise.normal("x", shape).to(like)
        levels = self.levels()
        for level, next_level in zip(levels, [*levels[1:], -1]):
            predicted = network(x, torch.full(shape[:1], level, device=x.device))
            new_noise = None
            if self.settings.noise_scheduler_type == "DDPM" and level > 0:
                new_noise = noise.normal(f"step{level}", shape).to(x)
            x = self.step(predicted, x, level, next_level, new_noise)
        return x

    def step(
        self, predicted: Tensor, x: Tensor, level: int, next_level: int, new_noise: Tensor | None
    ) -> Tensor:
        """x at `level` -> x at `next_level` (-1: clean); DDPM adds `new_noise`."""
        signal = self.signal[level]
        signal_root, noise_root = signal.sqrt().item(), (1 - signal).sqrt().item()
        if self.settings.prediction_type == "epsilon":
            clean, epsilon = (x - noise_root * predicted) / signal_root, predicted
        else:
            clean, epsilon = predicted, (x - signal_root * predicted) / noise_root
        if self.settings.clip_sample:
            clean = clean.clamp(-self.settings.clip_sample_range, self.settings.clip_sample_range)

        next_signal = self.signal[next_level] if next_level >= 0 else torch.tensor(1.0)
        if self.settings.noise_scheduler_type == "DDIM":
            return next_signal.sqrt().item() * clean + (1 - next_signal).sqrt().item() * epsilon
        ratio = signal / next_signal
        to_clean = (next_signal.sqrt() * (1 - ratio) / (1 - signal)).item()
        to_x = (ratio.sqrt() * (1 - next_signal) / (1 - signal)).item()
        x = to_clean * clean + to_x * x
        if new_noise is None:
            return x
        variance = ((1 - next_signal) / (1 - signal) * (1 - ratio)).clamp(min=1e-20)
        return x + variance.sqrt().item() * new_noise


def betas(settings: DiffusionSettings) -> Tensor:
    """How much noise each level adds to the one before it: [T]."""
    count, start, end = settings.num_train_timesteps, settings.beta_start, settings.beta_end
    if settings.beta_schedule == "linear":
        return torch.linspace(start, end, count)
    if settings.beta_schedule == "scaled_linear":
        return torch.linspace(start**0.5, end**0.5, count).square()

    # Nichol and Dhariwal 2021, https://arxiv.org/abs/2102.09672: the remaining signal is a squared cosine
    def remaining(time: float) -> float:
        return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2

    steps = [1 - remaining((i + 1) / count) / remaining(i / count) for i in range(count)]
    return torch.tensor(steps).clamp(max=0.999)


class StepEmbedding(nn.Module):
    """Levels [B] -> [B, dim]: sines, then cosines, of wavelengths from 2 pi to 10000 x 2 pi."""

    def __init__(self, dim: int):
        super().__init__()
        self.waves = dim // 2

    def forward(self, level: Tensor) -> Tensor:
        exponent = torch.arange(self.waves, device=level.device) * (-math.log(10_000) / (self.waves - 1))
        angle = level[:, None] * exponent.exp()
        return torch.cat((angle.sin(), angle.cos()), -1)
