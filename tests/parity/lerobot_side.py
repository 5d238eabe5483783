"""What LeRobot computes for every case of a kind: run in `tests`, where `lerobot` is installed.

    python -m parity.lerobot_side KIND FILE

Written to parity/KIND/golden.json, it is what the tests compare with. Weights, inputs and all that is drawn come from
fill.py, so that flexor_side.py can compute the same.
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from parity.fill import fill
from parity.inputs import BATCH, TASKS, action_of, observation_sequence, statistics
from parity.kinds import cases_of, lerobot_type, part
from parity.records import gradients, group, in_double, record_batch, save


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
        for key, values in statistics(case["robot"], action_of(case)).items()
    }
    return Made(
        get_policy_class(lerobot_type(kind))(config), *make_pre_post_processors(config, dataset_stats=stats)
    )


def make_config(kind: str, case: dict) -> Any:
    from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
    from lerobot.policies.factory import make_policy_config

    inputs, outputs = (
        {key: PolicyFeature(FeatureType(kind), shape) for key, (kind, shape) in described.items()}
        for described in (case["inputs"], action_of(case))
    )
    settings = dict(case["settings"])
    modes = settings.pop("normalization_mapping")
    settings = getattr(part(kind, "lerobot"), "settings", dict)(settings)
    config = make_policy_config(
        lerobot_type(kind),
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


def training_batch(made: Made, batch: dict) -> dict:
    """Processed, with the rewards and what is padding, which the processor does not keep."""
    unprocessed = {key: v for key, v in batch.items() if key.startswith("next.") or key.endswith("_is_pad")}
    return {**made.before({**batch, "task": TASKS}), **unprocessed}


def measure(kind: str, case: dict) -> dict:
    """Everything that is compared. `lerobot.py` of the kind says how LeRobot is made to draw what we draw."""
    special = part(kind, "lerobot")
    return special.measure(case) if hasattr(special, "measure") else measure_policy(kind, case)


def measure_policy(kind: str, case: dict) -> dict:
    cases, special = part(kind, "cases"), part(kind, "lerobot")
    made = make_policy(kind, case)
    policy = made.policy
    record: dict = {"parameters": getattr(cases, "fill_policy", fill)(policy)}
    record["groups"] = getattr(special, "groups", groups)(policy)
    record["drop_last"] = getattr(policy.config, "drop_n_last_frames", 0)
    batch = training_batch(made, tensors(cases.training_batch(case)))
    record["batch"] = record_batch(batch, case["robot"])
    if case.get("in_bf16"):
        policy.eval()
        return record | {"actions_in_bf16": act(kind, made, observation_sequence(case["robot"], cases.STEPS))}

    policy.train()
    if hasattr(special, "before_step"):
        record |= special.before_step(policy, batch)
    with special.training(policy):
        loss, parts = policy(with_state(batch))
    loss.backward()
    parts = {name: part for name, part in (parts or {}).items() if name in cases.PARTS}
    record["loss"] = {"loss": loss.item(), **parts}
    record["gradients"] = getattr(special, "gradients", gradients)(policy)
    if getattr(cases, "GRADIENTS_IN_DOUBLE", False):
        with special.training(policy), in_double(policy, batch) as (twin, wide):
            twin.zero_grad()
            twin(wide)[0].backward()
        record["gradients"] = gradients(twin)
    if hasattr(special, "after_step"):
        record |= special.after_step(policy)

    policy.eval()  # the loss as it is on held-out data
    with torch.no_grad(), special.training(policy):
        record["eval_loss"] = policy(with_state(batch))[0].item()
    if case.get("acts", True):
        record["actions"] = act(kind, made, observation_sequence(case["robot"], cases.STEPS))
    return record


def groups(policy: Any) -> list:
    """What LeRobot gives its optimizer: groups, or all parameters."""
    groups = list(policy.get_optim_params())
    if not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    return [group(policy, each["params"], each) for each in groups]


def act(kind: str, made: Made, observations: dict[str, np.ndarray]) -> list:
    """Actions [steps, B, A] for observations [steps, B, ...]."""
    made.policy.reset()
    actions = []
    for step in range(len(next(iter(observations.values())))):
        observed = made.before({**tensors({k: v[step] for k, v in observations.items()}), "task": TASKS})
        with part(kind, "lerobot").acting(made.policy, f"act {step}"):
            actions.append(made.after(made.policy.select_action(with_state(observed))).tolist())
    return actions


def main(kind: str, file: str) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        placed = cases_of(kind, Path(folder) / "files")
        save(Path(file), {name: measure(kind, case) for name, case in placed.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
