"""What is special about ours: times come from a beta distribution, which is tested on its own, and what is prompted."""

from typing import Any
from unittest.mock import patch

from parity import flexor_side
from parity.inputs import BATCH
from parity.pi0_fast.flexor import mean_over_tokens
from parity.wall_x.cases import gradients, pixels, prompts


def measure(case: dict) -> dict:
    with (
        patch("flexor.policies.nn.flow.beta", lambda noise, name, *_: noise.uniform(name, (BATCH,))),
        patch("flexor.policies.wall_x.policy.mean_over_tokens", mean_over_tokens),
        patch("parity.flexor_side.gradients", gradients),
    ):
        return flexor_side.measure_policy("wall_x", case)


def before_step(policy: Any, batch: dict) -> dict:
    patches = policy.prepare_images([batch[camera] for camera in policy.config.images])
    return {
        "prompts": prompts(batch["input_ids"], batch["attention_mask"]),
        "pixels": pixels(patches.flatten(0, 1)),
    }
