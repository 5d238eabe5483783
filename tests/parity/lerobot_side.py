"""How LeRobot's policies are made for a case and act: the same for every kind of policy."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from inputs import ACTION, BATCH, TASKS, statistics

# policy, step -> a context in which it draws what both programs agreed on
Acting = Callable[[Any, int], AbstractContextManager]


class Made(NamedTuple):
    """A policy with the processing it was trained with."""

    policy: Any
    before: Any
    after: Any


def make_policy(kind: str, case: dict) -> Made:
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    config = make_config(kind, case)
    stats = {
        key: {name: torch.from_numpy(value) for name, value in values.items()}
        for key, values in statistics(case["inputs"]).items()
    }
    return Made(get_policy_class(kind)(config), *make_pre_post_processors(config, dataset_stats=stats))


def make_config(kind: str, case: dict) -> Any:
    from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
    from lerobot.policies.factory import make_policy_config

    inputs, outputs = (
        {key: PolicyFeature(FeatureType(kind), shape) for key, (kind, shape) in described.items()}
        for described in (case["inputs"], ACTION)
    )
    settings = dict(case["settings"])
    modes = settings.pop("normalization_mapping")
    config = make_policy_config(
        kind,
        **settings,
        normalization_mapping={kind: NormalizationMode(mode) for kind, mode in modes.items()},
        input_features=inputs,
        output_features=outputs,
        device="cpu",
    )
    config.validate_features()
    return config


def tensors(batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Pictures as LeRobot's datasets and environments give them: floats in [0, 1]."""
    return {
        key: torch.from_numpy(v).float() / 255 if v.dtype == "uint8" else torch.from_numpy(v)
        for key, v in batch.items()
    }


def with_state(batch: dict) -> dict:
    """LeRobot asks the state for its device even where a policy has none."""
    return {"observation.state": torch.zeros(BATCH, 1), **batch}


def act(made: Made, observations: dict[str, np.ndarray], acting: Acting) -> list:
    """Actions [steps, B, A] for observations [steps, B, ...]."""
    made.policy.reset()
    actions = []
    for step in range(len(next(iter(observations.values())))):
        seen = made.before({**tensors({k: v[step] for k, v in observations.items()}), "task": TASKS})
        with acting(made.policy, step):
            actions.append(made.after(made.policy.select_action(with_state(seen))).tolist())
    return actions
