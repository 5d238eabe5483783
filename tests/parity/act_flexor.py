"""What Flexor's ACT computes for the same cases as act_lerobot.py, in the same form."""

import act_cases as cases
import numpy as np
import torch
from fill import fill
from records import gradients, record_batch, values

from flexor.policies.act import ACT, ACTConfig
from flexor.policies.actor import PolicyActor
from flexor.policies.base import Kind, PolicyFeature
from flexor.policies.blocks.resnet import ResNet
from flexor.policies.pretrained import Pretrained
from flexor.policies.processing import default_pipelines


class GivenNoise:
    """A noise source that returns what it was given."""

    def __init__(self, noise: np.ndarray):
        self.noise = torch.from_numpy(noise)

    def normal(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        assert tuple(shape) == tuple(self.noise.shape)
        return self.noise


def make_policy(case: dict) -> Pretrained:
    def features(described: dict) -> dict:
        return {key: PolicyFeature(Kind(kind), shape) for key, (kind, shape) in described.items()}

    config = ACTConfig(
        **case["settings"],
        input_features=features(case["inputs"]),
        output_features=features(cases.ACTION),
    )
    policy = ACT(config)
    before, after = default_pipelines(config, cases.statistics(case["inputs"]), "cpu")
    return Pretrained(policy, before, after)


def measure(name: str) -> dict:
    case = cases.CASES[name]
    pretrained = make_policy(case)
    policy, before = pretrained.policy, pretrained.preprocessor
    record: dict = {"parameters": fill(policy)}

    noise = GivenNoise(cases.latent_noise(case["settings"]))
    batch = before(tensors(cases.training_batch(case["inputs"])))
    record["batch"] = record_batch({k: v for k, v in batch.items() if k in case["inputs"] or k == "action"})
    policy.train()
    loss = policy.loss(batch, noise)
    loss.per_sample.mean().backward()
    record["loss"] = {
        name: part.mean().item() for name, part in {"loss": loss.per_sample, **loss.parts}.items()
    }
    record["gradients"] = gradients(policy)

    policy.eval()
    with torch.no_grad():
        record["eval_loss"] = policy.loss(batch, noise).per_sample.mean().item()
        seen = before(tensors(cases.observation(case["inputs"], "step 0")))
        record["chunk"] = values(policy.predict(seen, noise))
    actor = PolicyActor(pretrained)
    actor.reset(cases.BATCH)
    record["actions"] = [
        actor.act(cases.observation(case["inputs"], f"step {step}"), [""] * cases.BATCH).tolist()
        for step in range(cases.STEPS)
    ]
    return record


def tensors(batch: dict) -> dict:
    return {key: torch.from_numpy(value) for key, value in batch.items()}


def resnet(name: str) -> dict:
    network = ResNet(name)
    parameters = fill(network)
    picture = torch.from_numpy(cases.uniform("picture", (2, 3, 50, 70), -2, 2)).requires_grad_()
    out = network(picture)
    out.square().mean().backward()
    assert picture.grad is not None
    return {
        "parameters": parameters,
        "size": list(out.shape),
        "out": values(out[:, ::32]),
        "picture_gradient": picture.grad.norm().item(),
        "gradients": gradients(network),
    }
