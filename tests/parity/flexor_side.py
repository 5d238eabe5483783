"""What Flexor computes for a case: how its policies are made, learn and act.

    python -m parity.flexor_side KIND FOLDER FILE

The cases in bfloat16, with the files in FOLDER. LeRobot's environment can run it too, so that both programs compute
with the same torch: in bfloat16, attention depends on its version.
"""

import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from flexor.evaluate.rollout import PolicyActor
from flexor.policies import policy_class
from flexor.policies.base import Policy, PolicyConfig
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.pretrained import Pretrained
from parity.fill import Draws, fill
from parity.inputs import BATCH, TASKS, action_of, observation_sequence, statistics
from parity.kinds import cases_of, part
from parity.records import gradients, group, in_double, record_batch, save

INITIALIZERS = (  # by functions that need not be called: weights are filled in afterwards
    *("normal_", "uniform_", "kaiming_normal_", "kaiming_uniform_", "xavier_uniform_"),
    *("orthogonal_", "trunc_normal_"),
)


def make_config(kind: str, case: dict) -> PolicyConfig:
    inputs, outputs = (
        {key: PolicyFeature(Kind(kind), shape) for key, (kind, shape) in described.items()}
        for described in (case["inputs"], action_of(case))
    )
    settings = getattr(part(kind, "flexor"), "settings", dict)({**case["settings"], **case["ours"]})
    return policy_class(kind).Config(**settings, input_features=inputs, output_features=outputs)


def make_policy(kind: str, case: dict) -> Pretrained:
    config = make_config(kind, case)
    config.validate()
    before, after = config.pipelines(statistics(case["robot"], action_of(case)), "cpu")
    return Pretrained(policy_class(kind)(config), before, after)


def tensors(batch: dict) -> dict:
    return {key: torch.from_numpy(value) for key, value in batch.items()}


def measure(kind: str, case: dict) -> dict:
    """The same as lerobot_side.measure, in the same form."""
    special = part(kind, "flexor")
    return special.measure(case) if hasattr(special, "measure") else measure_policy(kind, case)


def measure_policy(kind: str, case: dict) -> dict:
    cases, special = part(kind, "cases"), part(kind, "flexor")
    with patch.multiple("torch.nn.init", **dict.fromkeys(INITIALIZERS, lambda tensor, *_, **__: tensor)):
        pretrained = make_policy(kind, case)
    policy = pretrained.policy
    record: dict = {"parameters": getattr(cases, "fill_policy", fill)(policy)}
    record["groups"] = getattr(special, "groups", groups)(policy)
    record["drop_last"] = policy.config.drop_last_frames
    batch = pretrained.preprocessor({**tensors(cases.training_batch(case)), "task": TASKS})
    record["batch"] = record_batch(batch, case["robot"])
    if case.get("in_bf16"):
        policy.eval().cast_to_act({name: weight.dtype for name, weight in policy.named_parameters()})
        return record | {"actions_in_bf16": act(pretrained, observation_sequence(case["robot"], cases.STEPS))}

    policy.train()
    if hasattr(special, "before_step"):
        record |= special.before_step(policy, batch)
    loss = policy.loss(batch, Draws("training"))
    in_float64 = getattr(cases, "GRADIENTS_IN_DOUBLE", False)
    if not in_float64:
        loss.per_sample.mean().backward()
    parts = {name: part.mean().item() for name, part in loss.parts.items() if name in cases.PARTS}
    record["loss"] = {"loss": loss.per_sample.mean().item(), **parts}
    record["gradients"] = gradients(policy)
    if in_float64:
        with in_double(policy, batch) as (twin, wide):
            twin.zero_grad()
            twin.loss(wide, Draws("training")).per_sample.mean().backward()
        record["gradients"] = gradients(twin)
    if hasattr(special, "after_step"):
        record |= special.after_step(policy)

    policy.eval()
    with torch.no_grad():
        record["eval_loss"] = policy.loss(batch, Draws("training")).per_sample.mean().item()
    if case.get("acts", True):
        record["actions"] = act(pretrained, observation_sequence(case["robot"], cases.STEPS))
    return record


def groups(policy: Policy) -> list:
    return [group(policy, each.params, each.overrides) for each in policy.param_groups()]


def act(pretrained: Pretrained, observations: dict[str, np.ndarray]) -> list:
    """Actions [steps, B, A] for observations [steps, B, ...]."""
    actor = PolicyActor(pretrained)
    actor.reset(BATCH)
    steps = len(next(iter(observations.values())))
    with patch("flexor.policies.session.Noise", lambda seed, step, episodes: Draws(f"act {step}")):
        return [
            actor.act({key: values[step] for key, values in observations.items()}, TASKS).tolist()
            for step in range(steps)
        ]


def main(kind: str, folder: str, file: str) -> None:
    torch.set_num_threads(1)
    cases = {name: case for name, case in cases_of(kind, Path(folder)).items() if case.get("in_bf16")}
    save(Path(file), {name: measure(kind, case) for name, case in cases.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
