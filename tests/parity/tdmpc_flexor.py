"""What Flexor's TD-MPC computes for the same cases as tdmpc_lerobot.py, in the same form."""

from unittest.mock import patch

import tdmpc_cases as cases
import torch
from fill import fill
from records import gradients, record_batch

from flexor.policies.actor import PolicyActor
from flexor.policies.base import Kind, PolicyFeature
from flexor.policies.pretrained import Pretrained
from flexor.policies.processing import default_pipelines
from flexor.policies.tdmpc import TDMPC, TDMPCConfig


class GivenNoise:
    """A noise source that returns what both programs draw."""

    def __init__(self, seed: object, step: object = "", sample_ids: object = None):
        self.draws = cases.Draws(step if step != "" else seed)

    def normal(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(self.draws.normal(name, shape))

    def uniform(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(self.draws.uniform(name, shape))

    def integers(self, name: str, shape: tuple[int, ...], high: int) -> torch.Tensor:
        return torch.from_numpy(self.draws.integers(name, shape, high))


def make_policy(case: dict) -> Pretrained:
    def features(described: dict) -> dict:
        return {key: PolicyFeature(Kind(kind), shape) for key, (kind, shape) in described.items()}

    config = TDMPCConfig(
        **case["settings"],
        input_features=features(case["inputs"]),
        output_features=features(cases.ACTION),
    )
    policy = TDMPC(config)
    before, after = default_pipelines(config, cases.statistics(case["inputs"]), "cpu")
    return Pretrained(policy, before, after)


def measure(name: str) -> dict:
    case = cases.CASES[name]
    pretrained = make_policy(case)
    policy, before = pretrained.policy, pretrained.preprocessor
    record: dict = {"parameters": fill(policy)}

    batch = before({key: torch.from_numpy(value) for key, value in cases.training_batch(case).items()})
    record["batch"] = record_batch(
        {key: value[:, 0] for key, value in batch.items() if key in case["inputs"] or key == "action"}
    )
    policy.train()
    loss = policy.loss(batch, GivenNoise("training"))
    loss.per_sample.mean().backward()
    record["loss"] = {
        name: part.mean().item() for name, part in {"loss": loss.per_sample, **loss.parts}.items()
    }
    record["gradients"] = gradients(policy)
    policy.begin_step(1)
    record["target"] = [p.norm().item() for p in policy.model_target.parameters()]

    policy.eval()
    with torch.no_grad():
        record["eval_loss"] = policy.loss(batch, GivenNoise("eval")).per_sample.mean().item()
    if case["acts"]:
        record["actions"] = act(pretrained, case["inputs"])
    return record


def act(pretrained: Pretrained, inputs: dict) -> list:
    actor = PolicyActor(pretrained)
    actor.reset(cases.BATCH)
    with patch("flexor.policies.actor.Noise", GivenNoise):
        return [
            actor.act(cases.observation(inputs, f"step {step}"), [""] * cases.BATCH).tolist()
            for step in range(cases.STEPS)
        ]
