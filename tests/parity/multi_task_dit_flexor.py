"""What Flexor's multi-task DiT computes for the same cases as multi_task_dit_lerobot.py, in the same form."""

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import diffusion_flexor
import flexor_side
import multi_task_dit_cases as cases
import torch
from fill import fill
from flexor_side import act, tensors
from inputs import BATCH, TASKS, history, shown
from records import gradients, group, record_batch, values

from flexor.policies.base import PolicyConfig
from flexor.policies.pretrained import Pretrained


class GivenNoise(diffusion_flexor.GivenNoise):
    def uniform(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        assert name == "time" and tuple(shape) == (BATCH,)
        return cases.times()


def acting(step: int) -> GivenNoise:
    return GivenNoise(f"act {step}")


def make_config(case: dict, clips: Path) -> PolicyConfig:
    return flexor_side.make_config("multi_task_dit", cases.with_clip(case, clips))


def make_policy(case: dict, clips: Path) -> Pretrained:
    return flexor_side.make_policy("multi_task_dit", cases.with_clip(case, clips))


def measure(name: str, clips: Path) -> dict:
    # what LeRobot draws from the beta distribution is given; ours is tested on its own
    with patch("flexor.policies.blocks.flow.beta", lambda noise, name, *_: noise.uniform(name, (BATCH,))):
        return _measure(name, clips)


def _measure(name: str, clips: Path) -> dict:
    case = cases.CASES[name]
    pretrained = make_policy(case, clips)
    policy, before = pretrained.policy, pretrained.preprocessor
    record: dict = {"parameters": fill(policy), "drop_last": policy.config.drop_last_frames}
    record["groups"] = [group(policy, each.params, each.overrides) for each in policy.param_groups()]

    batch = before({**tensors(cases.training_batch(name)), "task": TASKS})
    record["batch"] = record_batch({"action": batch["action"], "state": batch["observation.state"]})
    record["tokens"] = batch["observation.language.tokens"].tolist()
    record["mask"] = batch["observation.language.attention_mask"].int().tolist()
    noise = GivenNoise("training")
    policy.train()
    loss = policy.loss(batch, noise).per_sample.mean()
    loss.backward()
    record["loss"] = loss.item()
    record["gradients"] = gradients(policy)

    policy.eval()
    with torch.no_grad():
        record["eval_loss"] = policy.loss(batch, noise).per_sample.mean().item()
        seen = before({**tensors(history(case, "chunk")), "task": TASKS})
        chunk = policy.predict(seen, GivenNoise("chunk"))
        record["chunk"] = values(chunk[:, : policy.config.action_steps])
    record["actions"] = act(pretrained, shown(case["inputs"], cases.STEPS), acting)
    return record
