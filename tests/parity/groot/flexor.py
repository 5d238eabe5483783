"""What is special about ours: times come from a beta distribution, which is tested on its own, and what is prompted."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from flexor.policies.base import action_padding
from flexor.policies.nn.resize import padded
from parity import flexor_side
from parity.groot.cases import pixels, prompts
from parity.inputs import BATCH
from parity.records import values


def measure(case: dict) -> dict:
    with patch("flexor.policies.nn.flow.beta", lambda noise, name, *_: noise.uniform(name, (BATCH,))):
        return flexor_side.measure_policy("groot", case)


def before_step(policy: Any, batch: dict) -> dict:
    config = policy.config
    cameras = zip(policy.prepare_images, config.images)
    patches = torch.cat([prepare(batch[camera]) for prepare, camera in cameras], 1)
    valid = ~action_padding(batch)[..., None]
    return {
        "batch": {
            "state": values(padded(batch["observation.state"], config.max_state_dim)),
            "action": values(padded(batch["action"], config.max_action_dim) * valid),
            "valid": values(_mask(batch["action"], valid, config.max_action_dim)),
            "embodiment": values(batch["embodiment_id"]),
        },
        "prompts": prompts(batch["input_ids"], batch["attention_mask"]),
        "pixels": pixels(patches.flatten(0, 1)),
    }


def _mask(action: Tensor, valid: Tensor, width: int) -> Tensor:
    return padded(torch.ones_like(action), width) * valid
