"""Our steps."""

import torch

from flexor.policies.nn.resize import resize_with_padding
from flexor.policies.processing.pipeline import STEPS
from parity.processing.cases import TASKS, images, some, states


def measure(case: dict) -> dict:
    settings = dict(case["settings"])
    if "where" in settings:
        given = torch.from_numpy(images(settings.pop("shape")))
        return {"pixels": some(resize_with_padding(given, **settings))}
    step = STEPS[case["name"]].from_config(settings)
    assert step.config() == settings
    return {"prompts": step({"task": TASKS, "observation.state": torch.from_numpy(states())})["task"]}
