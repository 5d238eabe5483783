"""How Flexor's policies are made for a case and act: the same for every kind of policy."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from inputs import ACTION, BATCH, TASKS, statistics

from flexor.policies import policy_class
from flexor.policies.actor import PolicyActor
from flexor.policies.base import Kind, PolicyConfig, PolicyFeature
from flexor.policies.pretrained import Pretrained
from flexor.policies.processing import default_pipelines

Acting = Callable[[int], Any]  # step -> what noise a policy gets


def make_config(kind: str, case: dict) -> PolicyConfig:
    inputs, outputs = (
        {key: PolicyFeature(Kind(kind), shape) for key, (kind, shape) in described.items()}
        for described in (case["inputs"], ACTION)
    )
    return policy_class(kind).Config(**case["settings"], input_features=inputs, output_features=outputs)


def make_policy(kind: str, case: dict) -> Pretrained:
    config = make_config(kind, case)
    config.validate()
    before, after = default_pipelines(config, statistics(case["inputs"]), "cpu")
    return Pretrained(policy_class(kind)(config), before, after)


def tensors(batch: dict) -> dict:
    return {key: torch.from_numpy(value) for key, value in batch.items()}


def act(pretrained: Pretrained, observations: dict[str, np.ndarray], acting: Acting) -> list:
    """Actions [steps, B, A] for observations [steps, B, ...]."""
    actor = PolicyActor(pretrained)
    actor.reset(BATCH)
    steps = len(next(iter(observations.values())))
    with patch("flexor.policies.actor.Noise", lambda seed, step, episodes: acting(step)):
        return [
            actor.act({key: values[step] for key, values in observations.items()}, TASKS).tolist()
            for step in range(steps)
        ]
