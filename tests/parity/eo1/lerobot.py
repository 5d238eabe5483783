"""How LeRobot's EO-1 is made to draw what ours draws."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from parity.eo1.cases import pixels, prompts
from parity.fill import Draws
from parity.inputs import BATCH

NOISE = "lerobot.policies.eo1.modeling_eo1.sample_noise"


@contextmanager
def training(policy: Any) -> Iterator[None]:
    """A time from the beta distribution, and noise."""
    draws = Draws("training")
    with (
        patch(NOISE, lambda shape, device: draws.normal("noise", tuple(shape))),
        patch("torch.distributions.Beta.sample", lambda *_: draws.uniform("time", (BATCH,))),
    ):
        yield


def acting(policy: Any, moment: str) -> AbstractContextManager:
    return patch(NOISE, lambda shape, device: Draws(moment).normal("x", tuple(shape)))


def before_step(policy: Any, batch: dict) -> dict:
    """A patch has two frames, which are equal."""
    patches = batch["pixel_values"].unflatten(-1, (3, 2, 196))
    assert (patches[:, :, 0] == patches[:, :, 1]).all()
    return {
        "prompts": prompts(batch["input_ids"], batch["attention_mask"], batch["action_token_id"]),
        "pixels": pixels(patches[:, :, 0].flatten(1)),
    }
