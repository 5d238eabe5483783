"""The target model of LeRobot's TD-MPC, and how it is made to draw what ours draws."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from parity.fill import Draws
from parity.inputs import BATCH


def after_step(policy: Any) -> dict:
    policy.update()
    return {"target": [p.norm().item() for p in policy.model_target.parameters()]}


@contextmanager
def training(policy: Any) -> Iterator[None]:
    """Critics for the value, then for the advantage; shifts [t b, 1, 1, (x, y)]."""
    draws = Draws("training")
    names = iter(("critics/value", "critics/advantage"))

    def choice(count: int, size: int) -> np.ndarray:
        return draws.integers(next(names), (1, size), count)[0].numpy()

    def randint(low: int, high: int, size: tuple, device: object, dtype: torch.dtype) -> torch.Tensor:
        shape = BATCH, policy.config.horizon + 1
        shifts = [draws.integers(f"shift/{side}", shape, high) for side in ("left", "top")]
        return torch.stack(shifts, -1).transpose(0, 1).to(dtype).reshape(size)  # [t, b, (x, y)]

    with patch("numpy.random.choice", choice), patch("torch.randint", randint):
        yield


@contextmanager
def acting(policy: Any, moment: str) -> Iterator[None]:
    """In the order of its plan: the proposals, then per round samples, last actions and critics."""
    config, draws = policy.config, Draws(moment)
    batch, width, horizon = BATCH, config.action_feature.shape[0], config.horizon
    tried = config.n_gaussian_samples + config.n_pi_samples
    done = {"proposals": 0, "rounds": 0}

    def randn(*shape: int, device: object) -> torch.Tensor:
        name = f"plan/{done['rounds']}/samples"
        samples = draws.normal(name, (batch, config.n_gaussian_samples, horizon, width))
        return samples.permute(2, 1, 0, 3)

    def randn_like(like: torch.Tensor) -> torch.Tensor:
        t = done["proposals"]
        if t < horizon and config.n_pi_samples > 0:
            done["proposals"] += 1
            samples = draws.normal("plan/policy", (batch, config.n_pi_samples, horizon, width))
            return samples[:, :, t].transpose(0, 1)
        name = f"plan/{done['rounds']}/last"
        done["rounds"] += config.q_ensemble_size <= 2  # no critics are drawn then
        return draws.normal(name, (batch, tried, width)).transpose(0, 1)

    def randint(low: int, high: int, size: tuple) -> torch.Tensor:
        name = f"plan/{done['rounds']}/critics"
        done["rounds"] += 1
        return draws.integers(name, (1, *size), high)[0]

    def multinomial(weights: torch.Tensor, count: int) -> torch.Tensor:
        chance = draws.uniform("plan/choice", (batch, 1))
        return (weights.cumsum(1) < chance).sum(1, keepdim=True)

    with ExitStack() as stack:
        for fake in (randn, randn_like, randint, multinomial):
            stack.enter_context(patch(f"torch.{fake.__name__}", fake))
        yield
