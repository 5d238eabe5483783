"""How LeRobot's WALL-X is made to draw what ours draws, and to compute in float32, and as on a GPU."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from parity import lerobot_side
from parity.fill import Draws
from parity.inputs import BATCH
from parity.pi0_fast.lerobot import FastProcessor
from parity.wall_x.cases import gradients as gradients  # of this kind: lerobot_side asks for them
from parity.wall_x.cases import pixels, prompts

MODELING = "lerobot.policies.wall_x.modeling_wall_x"
NATIVE_RESIZE = "torchvision.transforms.v2.functional._geometry._do_native_uint8_resize_on_cpu"


class Torch:
    """torch, but with other functions and types: LeRobot's WALL-X draws noise by its functions, and names bfloat16."""

    def __init__(self, **others: Any):
        self.others = others

    def __getattr__(self, name: str) -> Any:
        return self.others.get(name) or getattr(torch, name)


@contextmanager
def prepared(folder: Path | None) -> Iterator[None]:
    """Inside, policies are in float32."""
    with (
        as_on_a_gpu(),
        patch(f"{MODELING}.torch", Torch(bfloat16=torch.float32)),
        patch(f"{MODELING}.AutoProcessor", Processors),
    ):
        yield


class Processors:
    """Of models, by `transformers`; of actions, without the Hub's code."""

    @staticmethod
    def from_pretrained(folder: str, **options: Any) -> Any:
        from transformers import AutoProcessor

        if Path(folder).name == "fast":
            fast = FastProcessor(folder)
            return lambda chunk: fast(torch.from_numpy(chunk)[None])
        return AutoProcessor.from_pretrained(folder, **options)


def as_on_a_gpu() -> AbstractContextManager:
    """Images are resized in float32 there, on a CPU with integer weights."""
    return patch(NATIVE_RESIZE, lambda *_: False)


@contextmanager
def drawing(**functions: Any) -> Iterator[None]:
    from lerobot.policies.wall_x import modeling_wall_x

    others = getattr(modeling_wall_x.torch, "others", {})
    with patch(f"{MODELING}.torch", Torch(**others, **functions)):
        yield


def measure(case: dict) -> dict:
    with as_on_a_gpu() if case.get("in_bf16") else prepared(None):
        return lerobot_side.measure_policy("wall_x", case)


@contextmanager
def training(policy: Any) -> Iterator[None]:
    """A time from the beta distribution, and noise."""
    draws = Draws("training")
    with (
        drawing(randn_like=lambda like, dtype: draws.normal("noise", tuple(like.shape))),
        patch("torch.distributions.Beta.sample", lambda *_: draws.uniform("time", (BATCH,))),
    ):
        yield


def acting(policy: Any, moment: str) -> AbstractContextManager:
    return drawing(randn=lambda size, **_: Draws(moment).normal("x", tuple(size)))


def before_step(policy: Any, batch: dict) -> dict:
    """A patch has two frames, which are equal."""
    inputs = policy.preprocess_inputs(dict(batch))
    patches = inputs["pixel_values"].unflatten(-1, (3, 2, 196))
    assert (patches[:, :, 0] == patches[:, :, 1]).all()
    return {
        "prompts": prompts(inputs["input_ids"], inputs["attention_mask"]),
        "pixels": pixels(patches[:, :, 0].flatten(1)),
    }
