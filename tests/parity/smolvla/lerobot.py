"""How LeRobot's SmolVLA is made to draw what ours draws."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from parity.fill import Draws
from parity.inputs import BATCH

NOISE = "lerobot.policies.smolvla.modeling_smolvla.sample_noise"


@contextmanager
def training(policy: Any) -> Iterator[None]:
    """Noise, then a time from the beta distribution."""
    draws = Draws("training")
    with (
        patch(NOISE, lambda shape, device: draws.normal("noise", shape)),
        patch("torch.distributions.Beta.sample", lambda *_: draws.uniform("time", (BATCH,))),
    ):
        yield


def acting(policy: Any, moment: str) -> AbstractContextManager:
    return patch(NOISE, lambda shape, device: Draws(moment).normal("x", shape))


def gradients(policy: Any) -> list[float | None]:
    """None also for what plays no part and got zeros, because its output was computed with that of others."""
    norms = [None if p.grad is None else p.grad.double().norm().item() for p in policy.parameters()]
    return [norm or None for norm in norms]
