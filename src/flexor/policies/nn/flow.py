"""Flow matching (Lipman et al. 2023, https://arxiv.org/abs/2210.02747): straight paths from noise to actions.

A network learns the velocity at every point of the path. Inference follows it from noise to an action. The straighter
the learned paths are, the fewer steps are enough. Where several actions are good, paths bend, and too few steps end
between these actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flexor.core.rng import NoiseSource
from flexor.policies.nn.real_time import PrefixGuidance

Velocity = Callable[[Tensor, Tensor], Tensor]  # x [B, ...], time [B] -> dx/dt [B, ...]
Method = Literal["euler", "rk4"]

# Rounds of rejection sampling. Each accepts more than 95 %, so that all 16 reject only once in 1e20 times.
ROUNDS = 16


@dataclass(frozen=True)
class FlowMatching:
    """The training error, and sampling of a chunk. Time is 0 for noise and 1 for actions."""

    sigma_min: float = 0.0
    """The noise that remains at the end of a path."""
    steps: int = 10
    """Integration steps at inference."""
    method: Method = "euler"
    time_beta: tuple[float, float] | None = None
    """Draw times as `time_max` x (1 - b), where b has this beta distribution; None: uniformly."""
    time_max: float = 1.0

    def error(self, network: Velocity, actions: Tensor, noise: NoiseSource) -> Tensor:
        """The squared error [B, H, A] of the velocity the network predicts on a path to actions [B, H, A]."""
        start = noise.normal("noise", tuple(actions.shape)).to(actions)
        time = self.times(len(actions), noise).to(actions)
        t, noise_range = time[:, None, None], 1 - self.sigma_min
        predicted = network(t * actions + (1 - noise_range * t) * start, time)
        return F.mse_loss(predicted, actions - noise_range * start, reduction="none")

    def times(self, batch: int, noise: NoiseSource) -> Tensor:
        if self.time_beta is None:
            return noise.uniform("time", (batch,))
        return self.time_max * (1 - beta(noise, "time", batch, *self.time_beta))

    def sample(
        self,
        network: Velocity,
        shape: Sequence[int],
        noise: NoiseSource,
        like: Tensor,
        guidance: PrefixGuidance | None = None,
    ) -> Tensor:
        """Actions of `shape` [B, H, A] from noise, on the device of `like`; with `guidance` by the last chunk."""
        start = noise.normal("x", shape).to(like)
        return integrate(network, start, self.steps, self.method, guidance)


@dataclass(frozen=True)
class FlowToNoise:
    """The same with reversed time, as in pi0 and its relatives: 0 for actions, 1 for noise."""

    steps: int = 10
    """Integration steps at inference."""
    time_beta: tuple[float, float] = (1.5, 1.0)
    """Draw times as `time_scale` x b + `time_offset`, where b has this beta distribution."""
    time_scale: float = 0.999
    time_offset: float = 0.001

    def error(self, network: Velocity, actions: Tensor, noise: NoiseSource) -> Tensor:
        """The squared error [B, H, A] of the velocity the network predicts on a path from actions [B, H, A]."""
        end = noise.normal("noise", tuple(actions.shape)).to(actions)
        time = self.times(len(actions), noise).to(actions)
        t = time[:, None, None]
        predicted = network(t * end + (1 - t) * actions, time)
        return F.mse_loss(predicted, end - actions, reduction="none")

    def times(self, batch: int, noise: NoiseSource) -> Tensor:
        return self.time_scale * beta(noise, "time", batch, *self.time_beta) + self.time_offset

    def sample(
        self,
        network: Velocity,
        shape: Sequence[int],
        noise: NoiseSource,
        like: Tensor,
        guidance: PrefixGuidance | None = None,
    ) -> Tensor:
        """Actions of `shape` [B, H, A] from pure noise, on the device of `like`; with `guidance` by the last chunk."""
        x = noise.normal("x", shape).to(like)
        for step in range(self.steps):
            time = 1 - step / self.steps
            velocity = network(x, x.new_full((len(x),), time))
            x = x - (velocity if guidance is None else guidance.correct(velocity, x, time)) / self.steps
        return x


def time_embedding(time: Tensor, dim: int, shortest: float, longest: float) -> Tensor:
    """Times [B] -> [B, dim]: sines, then cosines, with periods from `shortest` to `longest`."""
    # the shortest period is passed a thousand times
    dtype = torch.float32 if time.device.type == "mps" else torch.float64
    fraction = torch.linspace(0, 1, dim // 2, dtype=dtype, device=time.device)
    angle = time.to(dtype)[:, None] * (2 * math.pi / (shortest * (longest / shortest) ** fraction))
    return torch.cat((angle.sin(), angle.cos()), dim=1).to(time.dtype)


def integrate(
    velocity: Velocity,
    start: Tensor,
    steps: int,
    method: Method = "euler",
    guidance: PrefixGuidance | None = None,
) -> Tensor:
    """Follow the velocity from time 0 to time 1. Runge-Kutta evaluates it four times per step."""
    x, dt = start, 1 / steps

    def slope(x: Tensor, time: float) -> Tensor:
        out = velocity(x, x.new_full((len(x),), time))
        return out if guidance is None else -guidance.correct(-out, x, 1 - time)  # whose time is reversed

    for step in range(steps):
        t = step / steps
        step_velocity = slope(x, t)
        if method == "rk4":
            k1 = step_velocity
            k2 = slope(x + dt / 2 * k1, t + dt / 2)
            k3 = slope(x + dt / 2 * k2, t + dt / 2)
            k4 = slope(x + dt * k3, t + dt)
            step_velocity = (k1 + 2 * k2 + 2 * k3 + k4) / 6
        x = x + dt * step_velocity
    return x


def beta(noise: NoiseSource, name: str, batch: int, alpha: float, beta: float) -> Tensor:
    """[batch] draws from the beta distribution, seeded per sample, which torch's sampler does not support."""
    a = gamma(noise, f"{name}/alpha", batch, alpha)
    b = gamma(noise, f"{name}/beta", batch, beta)
    return (a / (a + b)).float()


def gamma(noise: NoiseSource, name: str, batch: int, shape: float) -> Tensor:
    """[batch] draws from the gamma distribution (Marsaglia and Tsang 2000), in float64.

    A cubed normal variable nearly follows it; rejection corrects the rest. All rounds are drawn at once and the first
    accepted one counts, so that a sample's draw does not depend on the other samples.
    """
    d = (shape if shape >= 1 else shape + 1) - 1 / 3
    x = noise.normal(f"{name}/normal", (batch, ROUNDS)).double()
    u = noise.uniform(f"{name}/accept", (batch, ROUNDS)).double()
    v = (1 + x / (9 * d) ** 0.5).clamp(min=0) ** 3
    accepted = (v > 0) & (u.log() < x.square() / 2 + d - d * v + d * v.clamp(min=1e-300).log())
    first = accepted.int().argmax(1, keepdim=True)
    sample = d * v.gather(1, first)[:, 0]
    if shape < 1:  # the method requires shape >= 1; a power of a uniform variable corrects for it
        sample = sample * noise.uniform(f"{name}/power", (batch,)).double() ** (1 / shape)
    return sample
