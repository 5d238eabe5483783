"""How LeRobot's Diffusion Policy is made to draw what ours draws."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from parity.fill import Draws


@contextmanager
def training(policy: Any) -> Iterator[None]:
    """LeRobot draws crops (encoder by encoder: top, then left), then the noise, then its level."""
    draws = Draws("training")
    separate = getattr(policy.config, "use_separate_rgb_encoder_per_camera", True)
    crops = (f"crop{i if separate else ''}/{side}" for i in range(9) for side in ("top", "left"))

    def randint(low: int, high: int, size: tuple, **_: object) -> torch.Tensor:
        assert low == 0
        return draws.integers(next(crops) if size == (1,) else "timestep", size, high)

    def randn(size: tuple, **_: object) -> torch.Tensor:
        return draws.normal("noise", size).to(torch.get_default_dtype())

    with patch("torch.randint", randint), patch("torch.randn", randn):
        yield


def acting(policy: Any, moment: str) -> AbstractContextManager:
    scheduler = policy.diffusion.noise_scheduler
    scheduler.set_timesteps(policy.diffusion.num_inference_steps)
    return denoising(scheduler.timesteps.tolist(), moment)


@contextmanager
def denoising(levels: list[int], moment: str) -> Iterator[None]:
    """The noise at the start, and that which DDPM adds at each level but the last."""
    draws, names = Draws(moment), (f"step{level}" for level in levels)
    added = "diffusers.schedulers.scheduling_ddpm.randn_tensor"
    with (
        patch("torch.randn", lambda size, **_: draws.normal("x", size)),
        patch(added, lambda shape, **_: draws.normal(next(names), shape)),
    ):
        yield
