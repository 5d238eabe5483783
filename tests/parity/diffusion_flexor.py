"""What Flexor's Diffusion Policy computes for the same cases as diffusion_lerobot.py, in the same form."""

from unittest.mock import patch

import diffusion_cases as cases
import torch
from act_flexor import tensors
from diffusion_cases import in_double
from fill import fill
from records import gradients, record_batch, values

from flexor.policies.actor import PolicyActor
from flexor.policies.base import Kind, PolicyFeature
from flexor.policies.diffusion import Diffusion, DiffusionConfig
from flexor.policies.pretrained import Pretrained
from flexor.policies.processing import default_pipelines


class GivenNoise:
    """A noise source that returns what the cases say for a moment."""

    def __init__(self, moment: str, settings: dict):
        self.moment = moment
        self.settings = settings

    def normal(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.from_numpy(cases.normal(self.moment, name, self.settings))
        assert noise.shape == tuple(shape)
        return noise

    def integers(self, name: str, shape: tuple[int, ...], high: int) -> torch.Tensor:
        return torch.from_numpy(cases.integers(name, shape[0], high)).expand(shape)


def make_policy(case: dict) -> Pretrained:
    def features(described: dict) -> dict:
        return {key: PolicyFeature(Kind(kind), shape) for key, (kind, shape) in described.items()}

    config = DiffusionConfig(
        **case["settings"],
        input_features=features(case["inputs"]),
        output_features=features(cases.ACTION),
    )
    before, after = default_pipelines(config, cases.statistics(case["inputs"]), "cpu")
    return Pretrained(Diffusion(config), before, after)


def measure(name: str) -> dict:
    case = cases.CASES[name]
    settings = case["settings"]
    pretrained = make_policy(case)
    policy, before = pretrained.policy, pretrained.preprocessor
    record: dict = {"parameters": fill(policy)}

    batch = before(tensors(cases.training_batch(name)))
    record["batch"] = record_batch({"action": batch["action"], "state": batch["observation.state"]})
    noise = GivenNoise("training", settings)
    policy.train()
    with in_double(policy, batch) as (twin, wide):
        twin.loss(wide, noise).per_sample.mean().backward()
    record["gradients"] = gradients(twin)

    with torch.no_grad():
        record["loss"] = policy.loss(batch, noise).per_sample.mean().item()
        policy.eval()
        record["eval_loss"] = policy.loss(batch, noise).per_sample.mean().item()
        seen = before(tensors(cases.history(name, "chunk")))
        chunk = policy.predict(seen, GivenNoise("chunk", settings))
        record["chunk"] = values(chunk[:, : policy.config.action_steps])
    record["actions"] = act(pretrained, case)
    return record


def act(pretrained: Pretrained, case: dict) -> list:
    def noise(seed: int, step: int, ids: torch.Tensor) -> GivenNoise:
        return GivenNoise(f"act {step}", case["settings"])

    actor = PolicyActor(pretrained)
    actor.reset(cases.BATCH)
    with patch("flexor.policies.actor.Noise", noise):
        return [
            actor.act(cases.observation(case["inputs"], f"step {step}"), [""] * cases.BATCH).tolist()
            for step in range(cases.STEPS)
        ]
