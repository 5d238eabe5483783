"""What is special about ours: times come from a beta distribution, which is tested on its own, and what is prompted."""

from typing import Any
from unittest.mock import patch

from parity import flexor_side
from parity.eo1.cases import pixels, prompts
from parity.inputs import BATCH


def measure(case: dict) -> dict:
    with patch("flexor.policies.nn.flow.beta", lambda noise, name, *_: noise.uniform(name, (BATCH,))):
        return flexor_side.measure_policy("eo1", case)


def before_step(policy: Any, batch: dict) -> dict:
    tokens = batch["input_ids"]
    patches = policy.model.prepare_images([batch[camera] for camera in policy.config.images])
    return {
        "prompts": prompts(tokens, batch["attention_mask"], int(tokens[0, -1])),
        "pixels": pixels(patches.flatten(0, 1)),
    }
