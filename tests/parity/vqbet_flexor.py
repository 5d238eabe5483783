"""What Flexor's VQ-BeT computes for the same cases as vqbet_lerobot.py, in the same form."""

from collections.abc import Sequence

import torch
import vqbet_cases as cases
from flexor_side import act, make_policy, tensors
from inputs import BATCH, shown
from records import gradients, group, record_batch

from flexor.policies.vqbet import VQBeT


class GivenNoise:
    """What both programs draw, by name."""

    def __init__(self, moment: str):
        self.moment = moment

    def uniform(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        assert name == "codes" and shape[0] == BATCH and shape[2] == 2
        return torch.from_numpy(cases.code_noise(self.moment, shape[1], shape[3]))

    def integers(self, name: str, shape: Sequence[int], high: int) -> torch.Tensor:
        return torch.full(shape, cases.place(name.removeprefix("crop/"), high))


def acting(step: int) -> GivenNoise:
    return GivenNoise(f"act {step}")


def measure(name: str) -> dict:
    case = cases.CASES[name]
    pretrained = make_policy("vqbet", case)
    policy, before = pretrained.policy, pretrained.preprocessor
    groups = [group(policy, each.params, each.overrides) for each in policy.param_groups()]
    record: dict = {"parameters": cases.fill_policy(policy), "groups": groups}
    batch = before(tensors(cases.training_batch(name)))
    record["batch"] = record_batch({"action": batch["action"], "state": batch["observation.state"]})

    policy.train()
    record["vocabulary"] = vocabulary(policy, batch)
    policy.begin_step(2)
    policy.zero_grad()
    loss = policy.loss(batch, GivenNoise("training"))
    loss.per_sample.mean().backward()
    parts = {part: loss.parts[part].mean().item() for part in cases.PARTS}
    record["loss"] = {"loss": loss.per_sample.mean().item(), **parts}
    record["gradients"] = gradients(policy)

    policy.eval()
    with torch.no_grad():
        record["eval_loss"] = policy.loss(batch, GivenNoise("training")).per_sample.mean().item()
    record["actions"] = act(pretrained, shown(case["inputs"], cases.STEPS), acting)
    return record


def vocabulary(policy: VQBeT, batch: dict) -> dict:
    """The first phase: two steps, and the loss on held-out data between them."""
    policy.begin_step(0)
    loss = policy.loss(batch, GivenNoise("training"))
    loss.per_sample.mean().backward()
    means = [part.mean().item() for part in (loss.per_sample, loss.parts["recon_l1_error"])]
    record = {"loss": means, "gradients": gradients(policy), "codebooks": cases.codebooks(policy)}
    policy.eval()
    with torch.no_grad():
        record["eval_loss"] = policy.loss(batch, GivenNoise("training")).per_sample.mean().item()
    policy.train()
    policy.begin_step(1)
    record["second_loss"] = policy.loss(batch, GivenNoise("training")).per_sample.mean().item()
    record["second_codebooks"] = cases.codebooks(policy)
    return record
