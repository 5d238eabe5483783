"""What is special about ours: times come from a beta distribution, which is tested on its own, and what is prompted."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from flexor.policies.base import action_padding
from flexor.policies.nn.resize import padded
from parity import flexor_side
from parity.fill import Draws
from parity.groot.cases import fill_policy, pixels, prompts
from parity.inputs import BATCH, TASKS, observation
from parity.records import values


def measure(case: dict) -> dict:
    with patch("flexor.policies.nn.flow.beta", lambda noise, name, *_: noise.uniform(name, (BATCH,))):
        return measure_with_base(case)


@contextmanager
def prepared(folder: Path) -> Iterator[None]:
    """Settings are completed by the base model's files, as training does."""
    make_config = flexor_side.make_config

    def completed(kind: str, case: dict) -> Any:
        return make_config(kind, case).with_base_processing()

    with patch.object(flexor_side, "make_config", completed):
        yield


def measure_with_base(case: dict) -> dict:
    with prepared(case["folder"]):
        record = flexor_side.measure_policy("groot", case)
        if not case.get("predicts_chunks"):
            return record
        made = flexor_side.make_policy("groot", case)
    fill_policy(made.policy)
    seen = observation(case["robot"], "chunk")
    predicted = made.chunk(seen, TASKS, Draws("chunk"))
    return record | {"chunk": predicted[:, : case["settings"]["n_action_steps"]].tolist()}


def before_step(policy: Any, batch: dict) -> dict:
    config = policy.config
    cameras = zip(policy.prepare_images, config.images)
    patches = torch.cat([prepare(batch[camera]) for prepare, camera in cameras], 1)
    valid = ~action_padding(batch)[..., None]
    later = (0, 0, 0, config.training_horizon - valid.shape[1])
    return {
        "batch": {
            "state": values(padded(batch["observation.state"], config.max_state_dim)),
            "action": values(F.pad(padded(batch["action"], config.max_action_dim) * valid, later)),
            "valid": values(F.pad(_mask(batch["action"], valid, config.max_action_dim), later)),
            "embodiment": values(batch["embodiment_id"]),
        },
        "prompts": prompts(batch["input_ids"], batch["attention_mask"]),
        "pixels": pixels(patches.flatten(0, 1)),
    }


def _mask(action: Tensor, valid: Tensor, width: int) -> Tensor:
    return padded(torch.ones_like(action), width) * valid
