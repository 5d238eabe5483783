"""Our steps."""

import torch

from flexor.policies.processing.pipeline import STEPS, Pipeline
from flexor.policies.xvla import processing
from parity.records import values
from parity.xvla_steps.cases import actions, observations

assert processing  # imported so that its steps are registered


def measure(case: dict) -> dict:
    steps = [STEPS[name].from_config(settings) for name, settings in case["steps"].items()]
    assert [step.config() for step in steps] == [*case["steps"].values()]
    batch = {name: torch.from_numpy(image) for name, image in observations().items()}
    done = Pipeline("steps", steps)({**batch, "action": torch.from_numpy(actions())})
    return {"out": {name: values(done[name]) for name in (*batch, "action", "domain_id") if name in done}}
