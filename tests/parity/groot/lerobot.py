"""How LeRobot's GR00T is made to draw what ours draws, and to take the tokenizer that is there.

It requires dm-tree, for which nothing is built here: `prepare_input` is written without.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from parity import lerobot_side
from parity.fill import Draws
from parity.groot.cases import fill_policy, pixels, prompts
from parity.groot.files import BACKBONE
from parity.inputs import BATCH, TASKS, observation
from parity.records import values

GROOT = "lerobot.policies.groot"


@contextmanager
def prepared(folder: Path) -> Iterator[None]:
    """The tokenizer and image processor are those in `folder`, instead of one on the Hub."""
    with ExitStack() as patches:
        name = f"{GROOT}.processor_groot.GROOT_N1_7_BACKBONE_MODEL"
        patches.enter_context(patch(name, str(folder / BACKBONE)))
        patches.enter_context(patch(f"{GROOT}.groot_n1_7.GR00TN17.prepare_input", prepare_input))
        yield


def prepare_input(model: Any, inputs: dict) -> tuple[Any, Any]:
    from transformers.feature_extraction_utils import BatchFeature

    def cast(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(model.dtype) if value.is_floating_point() else value

    both = [BatchFeature(data={key: cast(value) for key, value in inputs.items()}) for _ in range(2)]
    return both[0], both[1]


def measure(case: dict) -> dict:
    with prepared(case["folder"]):
        record = lerobot_side.measure_policy("groot", case)
        if case.get("predicts_chunks"):
            record["chunk"] = chunk(lerobot_side.make_policy("groot", case), case)
    return record


def chunk(made: Any, case: dict) -> list:
    """A whole chunk for one observation, decoded."""
    fill_policy(made.policy)
    observed = lerobot_side.tensors(observation(case["robot"], "chunk"))
    with acting(made.policy, "chunk"):
        predicted = made.policy.predict_action_chunk(made.before({**observed, "task": TASKS}))
    return values(made.after(predicted))


@contextmanager
def training(policy: Any) -> Iterator[None]:
    """Hidden states, noise, and a time from the beta distribution."""
    draws = Draws("training")
    with (
        patch("torch.rand", lambda *shape, **_: draws.uniform("state_dropout", shape)),
        patch("torch.randn", lambda shape, **_: draws.normal("noise", tuple(shape))),
        patch("torch.distributions.Beta.sample", lambda *_: draws.uniform("time", (BATCH,))),
    ):
        yield


def acting(policy: Any, moment: str) -> AbstractContextManager:
    return patch("torch.randn", lambda size, **_: Draws(moment).normal("x", tuple(size)))


def before_step(policy: Any, batch: dict) -> dict:
    """A patch has two frames, which are equal."""
    patches = batch["pixel_values"].unflatten(-1, (3, 2, 256))
    assert (patches[:, :, 0] == patches[:, :, 1]).all()
    return {
        "batch": {
            "state": values(batch["state"][:, 0]),
            "action": values(batch["action"]),
            "valid": values(batch["action_mask"]),
            "embodiment": values(batch["embodiment_id"]),
        },
        "prompts": prompts(batch["input_ids"], batch["attention_mask"]),
        "pixels": pixels(patches[:, :, 0].flatten(1)),
    }
