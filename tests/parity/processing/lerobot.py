"""LeRobot's steps."""

import torch

from parity.processing.cases import TASKS, images, some, states


def measure(case: dict) -> dict:
    settings = dict(case["settings"])
    if "where" in settings:
        return {"pixels": some(resize(settings))}
    from lerobot.policies.pi0 import processor_pi0
    from lerobot.policies.pi0_fast import processor_pi0_fast
    from lerobot.policies.pi05 import processor_pi05
    from lerobot.processor import ProcessorStepRegistry, TransitionKey

    assert (
        processor_pi0 and processor_pi05 and processor_pi0_fast
    )  # imported so that their steps are registered
    step = ProcessorStepRegistry.get(case["name"])(**settings)
    done = step(
        {
            TransitionKey.OBSERVATION: {"observation.state": torch.from_numpy(states())},
            TransitionKey.COMPLEMENTARY_DATA: {"task": list(TASKS)},
        }
    )
    return {"prompts": done[TransitionKey.COMPLEMENTARY_DATA]["task"]}


def resize(settings: dict) -> torch.Tensor:
    from lerobot.policies.common.vla_utils import resize_with_pad, resize_with_pad_torch

    given = torch.from_numpy(images(settings["shape"]))
    size = settings["height"], settings["width"]
    if settings["where"] == "centre":
        return resize_with_pad_torch(given, *size)
    return resize_with_pad(given, *size, pad_value=0)
