"""How LeRobot's X-VLA is made to draw what ours draws, and what its optimizer does."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from parity.fill import Draws
from parity.records import group
from parity.xvla.rates import at_steps


@contextmanager
def training(policy: Any) -> Iterator[None]:
    """A time for the batch, then noise. BART draws numbers of no shape, and drops no layer."""
    draws, rand = Draws("training"), torch.rand

    def time(*size: Any, **options: Any) -> torch.Tensor:
        return draws.uniform("time", size) if size == (1,) else rand(*size, **options)

    def noise(like: torch.Tensor) -> torch.Tensor:
        return draws.normal("noise", tuple(like.shape)).to(like)

    with patch("torch.rand", time), patch("torch.randn_like", noise):
        yield


def acting(policy: Any, moment: str) -> AbstractContextManager:
    def noise(*size: int, dtype: torch.dtype, **options: Any) -> torch.Tensor:
        return Draws(moment).normal("x", size).to(dtype)

    return patch("torch.randn", noise)


def before_step(policy: Any, batch: Any) -> dict:
    for module in policy.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return {}


def groups(policy: Any) -> list:
    return [group(policy, each["params"], each) for each in optimizer_of(policy).param_groups]


def after_step(policy: Any) -> dict:
    optimizer = optimizer_of(policy)
    schedule = policy.config.get_scheduler_preset()
    return {"rates": at_steps(optimizer, lambda steps: schedule.build(optimizer, steps), schedule)}


def optimizer_of(policy: Any) -> torch.optim.Optimizer:
    return policy.config.get_optimizer_preset().build(policy.get_optim_params())
