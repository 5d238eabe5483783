"""LeRobot's steps."""

import json

import numpy as np
import torch

from parity.processing.cases import (
    CHUNK,
    NAMES,
    TASKS,
    actions,
    chunk_noise,
    images,
    left_over,
    normalized_values,
    recorded,
    some,
    states,
    velocity,
)
from parity.records import values


def measure(case: dict) -> dict:
    settings = dict(case["settings"])
    if "where" in settings:
        return {"pixels": some(resize(settings))}
    if case["name"].startswith("rename "):
        return rename(settings)
    if case["name"].startswith("normalize "):
        return normalize(settings)
    if case["name"].startswith("relative "):
        return relative(settings)
    if case["name"].startswith("real time "):
        return real_time(settings)
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


def rename(settings: dict) -> dict:
    from lerobot.processor import RenameObservationsProcessorStep, TransitionKey

    step = RenameObservationsProcessorStep(**settings)
    assert step.get_config() == settings
    done = step({TransitionKey.OBSERVATION: {name: name for name in NAMES}})[TransitionKey.OBSERVATION]
    return {"names": [[new, old] for new, old in done.items()]}


def normalize(settings: dict) -> dict:
    from lerobot.processor import ProcessorStepRegistry, TransitionKey

    tensors = {
        part: {k: torch.from_numpy(v) for k, v in named.items()}
        for part, named in normalized_values().items()
    }
    action = tensors["values"].pop("action")
    out = {}
    for name in ("normalizer_processor", "unnormalizer_processor"):
        step = ProcessorStepRegistry.get(name)(**settings)
        step.load_state_dict(tensors["stats"])
        assert json.loads(json.dumps(step.get_config())) == settings
        done = step({TransitionKey.OBSERVATION: tensors["values"], TransitionKey.ACTION: action})
        normalized = {**done[TransitionKey.OBSERVATION], "action": done[TransitionKey.ACTION]}
        out[name] = {key: values(value) for key, value in normalized.items()}
    return {"normalized": out}


def resize(settings: dict) -> torch.Tensor:
    from lerobot.policies.common.vla_utils import resize_with_pad, resize_with_pad_torch

    pixels = torch.from_numpy(images(settings["shape"]))
    size = settings["height"], settings["width"]
    if settings["where"] == "centre":
        return resize_with_pad_torch(pixels, *size)
    return resize_with_pad(pixels, *size, pad_value=0)


def relative(settings: dict) -> dict:
    from lerobot.datasets.compute_stats import compute_relative_action_stats
    from lerobot.processor import AbsoluteActionsProcessorStep, RelativeActionsProcessorStep, TransitionKey

    step = RelativeActionsProcessorStep(**settings)
    assert step.get_config() == settings
    out: dict[str, list] = {"relative": [], "absolute": []}
    for shape in ((), (CHUNK,)):
        chunk = torch.from_numpy(actions(*shape))
        observed = {"observation.state": torch.from_numpy(states())}
        done = step({TransitionKey.OBSERVATION: observed, TransitionKey.ACTION: chunk})
        out["relative"].append(values(done[TransitionKey.ACTION]))
        after = AbsoluteActionsProcessorStep(True, step)({TransitionKey.ACTION: chunk})
        out["absolute"].append(values(after[TransitionKey.ACTION]))
    features = {"action": {"shape": (4,), "names": settings["action_names"]}}
    stats = compute_relative_action_stats(recorded(), features, CHUNK, settings["exclude_joints"])
    out["stats"] = [np.asarray(stats[name]).tolist() for name in sorted(stats)]
    return out


def real_time(settings: dict) -> dict:
    from lerobot.configs import RTCAttentionSchedule
    from lerobot.policies.common.flow_matching import euler_integrate
    from lerobot.policies.rtc.configuration_rtc import RTCConfig
    from lerobot.policies.rtc.modeling_rtc import RTCProcessor

    delay, left = settings.pop("delay"), settings.pop("left")
    schedule = RTCAttentionSchedule[settings.pop("prefix_attention_schedule")]
    chunk = euler_integrate(
        velocity,
        torch.from_numpy(chunk_noise()),
        10,
        rtc_processor=RTCProcessor(RTCConfig(prefix_attention_schedule=schedule, **settings)),
        rtc_enabled=True,
        inference_delay=delay,
        prev_chunk_left_over=torch.from_numpy(left_over(left)),
    )
    return {"chunk": values(chunk)}
