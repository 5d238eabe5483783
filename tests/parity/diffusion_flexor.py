"""What Flexor's Diffusion Policy computes for the same cases as diffusion_lerobot.py, in the same form."""

from collections.abc import Sequence

import diffusion_cases as cases
import torch
from fill import fill
from flexor_side import act, make_policy, tensors
from inputs import history, shown
from records import gradients, record_batch, values


class GivenNoise:
    """A noise source that returns what the cases say for a moment."""

    def __init__(self, moment: str):
        self.moment = moment

    def normal(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        return cases.normal(self.moment, name, shape)

    def integers(self, name: str, shape: Sequence[int], high: int) -> torch.Tensor:
        return cases.integers(name, shape[0], high).expand(shape)


def acting(step: int) -> GivenNoise:
    return GivenNoise(f"act {step}")


def measure(name: str) -> dict:
    case = cases.CASES[name]
    pretrained = make_policy("diffusion", case)
    policy, before = pretrained.policy, pretrained.preprocessor
    record: dict = {"parameters": fill(policy)}

    batch = before(tensors(cases.training_batch(name)))
    record["batch"] = record_batch({"action": batch["action"], "state": batch["observation.state"]})
    noise = GivenNoise("training")
    policy.train()
    with cases.in_double(policy, batch) as (twin, wide):
        twin.loss(wide, noise).per_sample.mean().backward()
    record["gradients"] = gradients(twin)

    with torch.no_grad():
        record["loss"] = policy.loss(batch, noise).per_sample.mean().item()
        policy.eval()
        record["eval_loss"] = policy.loss(batch, noise).per_sample.mean().item()
        seen = before(tensors(history(case, "chunk")))
        chunk = policy.predict(seen, GivenNoise("chunk"))
        record["chunk"] = values(chunk[:, : policy.config.action_steps])
    record["actions"] = act(pretrained, shown(case["inputs"], cases.STEPS), acting)
    return record
