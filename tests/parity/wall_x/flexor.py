"""What is special about ours: times come from a beta distribution, which is tested on its own, and what is prompted."""

from typing import Any
from unittest.mock import patch

from parity import flexor_side
from parity.inputs import BATCH
from parity.wall_x.cases import pixels, prompts


def measure(case: dict) -> dict:
    with patch("flexor.policies.nn.flow.beta", lambda noise, name, *_: noise.uniform(name, (BATCH,))):
        return flexor_side.measure_policy("wall_x", case)


def before_step(policy: Any, batch: dict) -> dict:
    patches = policy.prepare_images([batch[camera] for camera in policy.config.images])
    return {
        "prompts": prompts(batch["input_ids"], batch["attention_mask"]),
        "pixels": pixels(patches.flatten(0, 1)),
    }
