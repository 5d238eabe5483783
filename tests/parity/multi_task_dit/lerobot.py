"""How LeRobot's multi-task DiT is made to draw what ours draws."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from parity.diffusion.lerobot import denoising
from parity.fill import Draws
from parity.inputs import BATCH


@contextmanager
def training(policy: Any) -> Iterator[None]:
    """LeRobot draws crops (encoder by encoder: top, then left), then the noise, then its level or time."""
    draws = Draws("training")
    crops = (f"crop{i}/{side}" for i in range(9) for side in ("top", "left"))

    def randint(low: int, high: int, size: tuple, **_: object) -> torch.Tensor:
        assert low == 0
        return draws.integers(next(crops) if size == (1,) else "timestep", size, high)

    def time(*_: object, **__: object) -> torch.Tensor:
        return draws.uniform("time", (BATCH,))

    with (
        patch("torch.randint", randint),
        patch("torch.randn_like", lambda like: draws.normal("noise", like.shape)),
        patch("torch.rand", time),
        patch("torch.distributions.Beta.sample", time),
    ):
        yield


def acting(policy: Any, moment: str) -> AbstractContextManager:
    if policy.config.is_flow_matching:
        return denoising([], moment)
    scheduler = policy.objective.noise_scheduler
    scheduler.set_timesteps(policy.objective.num_inference_steps)
    return denoising(scheduler.timesteps.tolist(), moment)


def gradients(policy: Any) -> list[float | None]:
    """Of what is trained and plays no part (CLIP's last normalisation), zero."""
    norms = [None if p.grad is None else p.grad.double().norm().item() for p in policy.parameters()]
    return [n or 0.0 if p.requires_grad else n for p, n in zip(policy.parameters(), norms)]
