"""What Flexor's TD-MPC computes for the same cases as tdmpc_lerobot.py, in the same form."""

from collections.abc import Sequence

import tdmpc_cases as cases
import torch
from fill import fill
from flexor_side import act, make_policy, tensors
from inputs import shown
from records import gradients, record_batch


class GivenNoise:
    """A noise source that returns what both programs draw."""

    def __init__(self, moment: object):
        self.draws = cases.Draws(moment)

    def normal(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(self.draws.normal(name, shape))

    def uniform(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(self.draws.uniform(name, shape))

    def integers(self, name: str, shape: Sequence[int], high: int) -> torch.Tensor:
        return torch.from_numpy(self.draws.integers(name, shape, high))


acting = GivenNoise  # a step is a moment


def measure(name: str) -> dict:
    case = cases.CASES[name]
    pretrained = make_policy("tdmpc", case)
    policy, before = pretrained.policy, pretrained.preprocessor
    record: dict = {"parameters": fill(policy)}

    batch = before(tensors(cases.training_batch(case)))
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
        record["actions"] = act(pretrained, shown(case["inputs"], cases.STEPS), acting)
    return record
