"""What Flexor's VQ-BeT computes for the same cases as vqbet_lerobot.py, in the same form."""

from unittest.mock import patch

import torch
import vqbet_cases as cases
from act_flexor import tensors
from records import gradients, record_batch

from flexor.policies.actor import PolicyActor
from flexor.policies.base import Kind, PolicyFeature
from flexor.policies.pretrained import Pretrained
from flexor.policies.processing import default_pipelines
from flexor.policies.vqbet import VQBeT, VQBeTConfig


class GivenNoise:
    """What both programs draw, by name."""

    def __init__(self, moment: str):
        self.moment = moment

    def uniform(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        assert name == "codes" and shape[0] == cases.BATCH and shape[2] == 2
        return torch.from_numpy(cases.code_noise(self.moment, shape[1], shape[3]))

    def integers(self, name: str, shape: tuple[int, ...], high: int) -> torch.Tensor:
        return torch.full(shape, cases.place(name.removeprefix("crop/"), high))


def make_policy(case: dict) -> Pretrained:
    def features(described: dict) -> dict:
        return {key: PolicyFeature(Kind(kind), shape) for key, (kind, shape) in described.items()}

    config = VQBeTConfig(
        **case["settings"],
        input_features=features(case["inputs"]),
        output_features=features(cases.ACTION),
    )
    before, after = default_pipelines(config, cases.statistics(case["inputs"]), "cpu")
    return Pretrained(VQBeT(config), before, after)


def measure(name: str) -> dict:
    case = cases.CASES[name]
    pretrained = make_policy(case)
    policy, before = pretrained.policy, pretrained.preprocessor
    groups = [cases.group(policy, group.params, group.overrides) for group in policy.param_groups()]
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
    record["actions"] = act(pretrained, case)
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


def act(pretrained: Pretrained, case: dict) -> list:
    actor = PolicyActor(pretrained)
    actor.reset(cases.BATCH)
    moments = (cases.observation(case["inputs"], f"step {step}") for step in range(cases.STEPS))
    with patch("flexor.policies.actor.Noise", lambda seed, step, episodes: GivenNoise(f"act {step}")):
        return [actor.act(seen, [""] * cases.BATCH).tolist() for seen in moments]
