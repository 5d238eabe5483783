"""What Flexor's multi-task DiT computes for the same cases as multi_task_dit_lerobot.py, in the same form."""

from pathlib import Path
from unittest.mock import patch

import multi_task_dit_cases as cases
import torch
from act_flexor import tensors
from fill import fill
from records import gradients, record_batch, values

from flexor.policies.actor import PolicyActor
from flexor.policies.base import Kind, PolicyFeature
from flexor.policies.multi_task_dit import MultiTaskDiT, MultiTaskDiTConfig
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

    def uniform(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        assert name == "time" and tuple(shape) == (cases.BATCH,)
        return torch.from_numpy(cases.times(self.settings))


def make_config(case: dict, clips: Path) -> MultiTaskDiTConfig:
    def features(described: dict) -> dict:
        return {key: PolicyFeature(Kind(kind), shape) for key, (kind, shape) in described.items()}

    return MultiTaskDiTConfig(
        **case["settings"],
        vision_encoder_name=str(clips / case["clip"]),
        text_encoder_name=str(clips / case["clip"]),
        input_features=features(case["inputs"]),
        output_features=features(cases.ACTION),
    )


def make_policy(case: dict, clips: Path) -> Pretrained:
    config = make_config(case, clips)
    before, after = default_pipelines(config, cases.statistics(case["inputs"]), "cpu")
    return Pretrained(MultiTaskDiT(config), before, after)


def measure(name: str, clips: Path) -> dict:
    # what LeRobot draws from the beta distribution is given; ours is tested on its own
    with patch(
        "flexor.policies.blocks.flow.beta", lambda noise, name, *_: noise.uniform(name, (cases.BATCH,))
    ):
        return _measure(name, clips)


def _measure(name: str, clips: Path) -> dict:
    case = cases.CASES[name]
    settings = case["settings"]
    pretrained = make_policy(case, clips)
    policy, before = pretrained.policy, pretrained.preprocessor
    record: dict = {"parameters": fill(policy), "drop_last": policy.config.drop_last_frames}
    record["groups"] = [len(group.params) for group in policy.param_groups()]

    batch = before({**tensors(cases.training_batch(name)), "task": cases.TASKS})
    record["batch"] = record_batch({"action": batch["action"], "state": batch["observation.state"]})
    record["tokens"] = batch["observation.language.tokens"].tolist()
    record["mask"] = batch["observation.language.attention_mask"].int().tolist()
    noise = GivenNoise("training", settings)
    policy.train()
    loss = policy.loss(batch, noise).per_sample.mean()
    loss.backward()
    record["loss"] = loss.item()
    record["gradients"] = gradients(policy)

    policy.eval()
    with torch.no_grad():
        record["eval_loss"] = policy.loss(batch, noise).per_sample.mean().item()
        seen = before({**tensors(cases.history(name, "chunk")), "task": cases.TASKS})
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
            actor.act(cases.observation(case["inputs"], f"step {step}"), cases.TASKS).tolist()
            for step in range(cases.STEPS)
        ]
