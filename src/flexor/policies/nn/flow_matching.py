"""Flow matching as pi0 and SmolVLA do it: straight paths from actions (time 0) to noise (time 1).

The network learns the velocity on a path, noise minus actions. Inference follows it backwards from noise with Euler's
method. Multi-Task DiT has other conventions: see `multi_task_dit/flow.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flexor.core.rng import NoiseSource

Velocity = Callable[[Tensor, Tensor], Tensor]  # x [B, H, A], time [B] -> noise - actions [B, H, A]


@dataclass(frozen=True)
class NoiseFlow:
    """The training error, and sampling of a chunk."""

    steps: int = 10
    """Euler steps at inference."""
    alpha: float = 1.5
    """Times in training have the beta distribution (alpha, 1), which draws more of them near noise."""
    earliest: float = 0.001
    """The earliest time in training; the latest is 1."""

    def error(self, network: Velocity, actions: Tensor, noise: NoiseSource) -> Tensor:
        """The squared error [B, H, A] of the velocity that the network predicts on a path from actions [B, H, A]."""
        end = noise.normal("noise", tuple(actions.shape)).to(actions)
        time = self.times(len(actions), noise).to(actions)
        t = time[:, None, None]
        predicted = network(t * end + (1 - t) * actions, time)
        return F.mse_loss(predicted.float(), (end - actions).float(), reduction="none")

    def times(self, batch: int, noise: NoiseSource) -> Tensor:
        return beta_draw(noise, "time", batch, self.alpha) * (1 - self.earliest) + self.earliest

    def sample(self, network: Velocity, shape: Sequence[int], noise: NoiseSource, like: Tensor) -> Tensor:
        """Actions of `shape` [B, H, A] from pure noise, on the device of `like`."""
        x, pace = noise.normal("x", shape).to(like), 1 / self.steps
        for step in range(self.steps):
            x = x - pace * network(x, x.new_full((len(x),), 1 - step * pace))
        return x


def beta_draw(noise: NoiseSource, name: str, batch: int, alpha: float) -> Tensor:
    """[batch] draws from the beta distribution (alpha, 1): a power of a uniform variable."""
    return noise.uniform(name, (batch,)) ** (1 / alpha)


def embed_time(time: Tensor, width: int, shortest: float, longest: float) -> Tensor:
    """Times [B] -> [B, width]: sines, then cosines, with periods from `shortest` to `longest`.

    In float64: with a period of 0.004, a rounding error of a float32 angle would be felt.
    """
    dtype = torch.float32 if time.device.type == "mps" else torch.float64  # which has no float64
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=dtype, device=time.device)
    period = shortest * (longest / shortest) ** fraction
    angle = 2 * math.pi / period * time[:, None].to(dtype)
    return torch.cat((angle.sin(), angle.cos()), 1)
