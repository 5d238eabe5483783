"""LeRobot's steps."""

import torch

from parity.records import values
from parity.xvla_steps.cases import actions, observations


def measure(case: dict) -> dict:
    from lerobot.policies.xvla import processor_xvla
    from lerobot.processor import ProcessorStepRegistry, TransitionKey

    assert processor_xvla  # imported so that its steps are registered
    transition = {
        TransitionKey.OBSERVATION: {name: torch.from_numpy(image) for name, image in observations().items()},
        TransitionKey.ACTION: torch.from_numpy(actions()),
    }
    for name, settings in case["steps"].items():
        step = ProcessorStepRegistry.get(name)(**settings)
        assert step.get_config() == settings
        transition = step(transition)
    done = {**transition[TransitionKey.OBSERVATION], "action": transition[TransitionKey.ACTION]}
    done |= transition.get(TransitionKey.COMPLEMENTARY_DATA, {})
    return {"out": {name: values(value) for name, value in done.items()}}
