"""Our steps."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from flexor.data.statistics import relative_action_stats
from flexor.policies.nn.flow import FlowToNoise
from flexor.policies.nn.real_time import GUIDANCE_WEIGHTS, PREVIOUS, RealTimeSettings, prefix_guidance
from flexor.policies.nn.resize import resize_with_padding
from flexor.policies.processing.pipeline import STEPS, StepContext
from flexor.policies.processing.relative_actions import AbsoluteActions, RelativeActions
from parity.processing.cases import (
    CHUNK,
    LENGTHS,
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
        pixels = torch.from_numpy(images(settings.pop("shape")))
        return {"pixels": some(resize_with_padding(pixels, **settings))}
    if case["name"].startswith("real time "):
        return real_time(settings)
    if case["name"].startswith("rename "):
        step = STEPS["rename_observations_processor"].from_config(settings)
        assert step.config() == settings
        return {"names": [[new, old] for new, old in step({name: name for name in NAMES}).items()]}
    if case["name"].startswith("normalize "):
        return normalize(settings)
    if case["name"].startswith("relative "):
        return relative(RelativeActions(**settings))
    step = STEPS[case["name"]].from_config(settings)
    assert step.config() == settings
    return {"prompts": step({"task": TASKS, "observation.state": torch.from_numpy(states())})["task"]}


def normalize(settings: dict) -> dict:
    tensors = {
        part: {k: torch.from_numpy(v) for k, v in named.items()}
        for part, named in normalized_values().items()
    }
    out = {}
    for name in ("normalizer_processor", "unnormalizer_processor"):
        step = STEPS[name].from_config(settings)
        step.load_state(tensors["stats"])
        assert step.config() == settings
        out[name] = {key: values(value) for key, value in step(tensors["values"]).items()}
    return {"normalized": out}


def relative(step: RelativeActions) -> dict:
    observed = {"observation.state": torch.from_numpy(states())}
    out: dict[str, list] = {"relative": [], "absolute": []}
    for shape in ((), (CHUNK,)):
        chunk = torch.from_numpy(actions(*shape))
        out["relative"].append(values(step({**observed, "action": chunk})["action"]))
        after = AbsoluteActions(True, step)({"action": chunk}, StepContext(observation=observed))
        out["absolute"].append(values(after["action"]))
    end = np.cumsum(LENGTHS)
    episodes = SimpleNamespace(start=end - LENGTHS, end=end, length=np.array(LENGTHS))
    dataset: Any = SimpleNamespace(columns=recorded(), episodes=episodes)
    stats = relative_action_stats(dataset, step.relative(4), CHUNK)
    out["stats"] = [np.asarray(stats[name]).tolist() for name in sorted(stats)]
    return out


def real_time(settings: dict) -> dict:
    delay, left = settings.pop("delay"), settings.pop("left")
    start = torch.from_numpy(chunk_noise())
    _, length, width = start.shape
    weights = RealTimeSettings.of(settings).guidance_weights(length, left, delay)
    batch = {PREVIOUS: torch.from_numpy(left_over(left)), GUIDANCE_WEIGHTS: weights}
    guidance = prefix_guidance(batch, settings, length, width)
    noise: Any = SimpleNamespace(normal=lambda name, shape: start)
    return {"chunk": values(FlowToNoise().sample(velocity, start.shape, noise, start, guidance))}
