"""What Flexor's ACT computes for the same cases as act_lerobot.py, in the same form."""

import act_cases as cases
import numpy as np
import torch
from fill import fill
from flexor_side import act, make_policy, tensors
from inputs import observation, shown
from records import gradients, record_batch, values

from flexor.policies.blocks.resnet import ResNet


class GivenNoise:
    """A noise source that returns what it was given."""

    def __init__(self, noise: np.ndarray):
        self.noise = torch.from_numpy(noise)

    def normal(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        assert tuple(shape) == tuple(self.noise.shape)
        return self.noise


def acting(step: int) -> None:
    """Nothing is drawn."""


def measure(name: str) -> dict:
    case = cases.CASES[name]
    pretrained = make_policy("act", case)
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
        seen = before(tensors(observation(case["inputs"], "step 0")))
        record["chunk"] = values(policy.predict(seen, noise))
    record["actions"] = act(pretrained, shown(case["inputs"], cases.STEPS), acting)
    return record


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
