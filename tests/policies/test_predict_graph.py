"""A prediction as a CUDA graph: the same actions as without one, bitwise; what can't be captured still runs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flexor.config.parse import load_config
from flexor.core.rng import GraphNoise, Noise, NoiseKeys
from flexor.plan.data.imagined_robot import Robot
from flexor.policies import policy_class, predict_graph
from flexor.policies.pretrained import Pretrained
from flexor.policies.session import Session, act_together
from support.small_policies import SMALL, small_flags

ROBOT = Robot(cameras=1, height=48, width=48, state=4, action=3)
ACT = ["dim_model=16", "n_heads=2", "dim_feedforward=16", "pretrained_backbone_weights=null"]


def test_noise_of_a_graph_with_a_step_per_sample():
    ids, steps = torch.tensor([3, 8, 2**40]), [4, 0, 4]
    keys = NoiseKeys(ids.device, rows=3)
    noise = GraphNoise(keys, ids)
    noise.normal("a", (3, 2)), noise.integers("b", (3,), 7)  # as while it is captured
    keys.write(5, steps)
    plain = Noise(5, steps, ids)
    assert torch.equal(noise.normal("a", (3, 2)), plain.normal("a", (3, 2)))
    assert torch.equal(noise.integers("b", (3,), 7), plain.integers("b", (3,), 7))


# On a GPU


def pretrained(folder: Path, name: str = "act", device: str = "cuda", **settings: object) -> Pretrained:
    """A policy with random weights; what it needs beside them is made in a folder."""
    flags = (
        small_flags(name, folder) if name in SMALL else [f"--policy.{each}" for each in ("type=act", *ACT)]
    )
    if name == "multi_task_dit":
        flags += ["--policy.image_resize_shape=[32,32]", "--policy.image_crop_shape=null"]
    config = replace(ROBOT.fill_in(load_config([*flags, "--dataset.repo_id=made/up"]).policy), **settings)
    torch.manual_seed(0)
    policy = policy_class(name)(config)
    if settings:
        policy.cast_to_act({each: weight.dtype for each, weight in policy.named_parameters()})
    policy = policy.to(device).eval()
    ones = {"min": -np.ones(4), "max": np.ones(4), "mean": np.zeros(4), "std": np.ones(4)}
    ones |= {"q01": -np.ones(4), "q99": np.ones(4)}
    picture = {key: np.full((3, 1, 1), value) for key, value in (("mean", 0.5), ("std", 0.3))}
    stats = {
        "observation.state": ones,
        "action": {key: value[:3] for key, value in ones.items()},
        **dict.fromkeys(config.images, picture),
    }
    return Pretrained(policy, *config.pipelines(stats, device))


def observations(step: int, robots: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(step)
    return [
        {
            "observation.images.camera0": rng.integers(0, 256, (3, 48, 48), dtype=np.uint8),
            "observation.state": rng.uniform(-1, 1, 4).astype(np.float32),
        }
        for _ in range(robots)
    ]


def played(policy: Pretrained, steps: int, robots: int = 2) -> np.ndarray:
    """The actions [steps, robots, A]. The second robot starts two steps later: its steps are others."""
    sessions = [Session(policy, seed=3, episode=row) for row in range(robots)]
    actions = []
    for step in range(steps):
        now = sessions if step >= 2 else sessions[:1]
        predicted = act_together(now, observations(step, len(now)), [""] * len(now))
        actions.append(np.pad(predicted, ((0, robots - len(now)), (0, 0))))
    return np.stack(actions)


@pytest.fixture
def replays(monkeypatch) -> list[str]:
    calls: list[str] = []
    replay = predict_graph._replay
    monkeypatch.setattr(
        predict_graph, "_replay", lambda *arguments: calls.append("replayed") or replay(*arguments)
    )
    return calls


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["act", *SMALL])
def test_a_graph_predicts_what_is_predicted_without_one(name, replays, tmp_path, monkeypatch):
    graphs = played(policy := pretrained(tmp_path, name), 60)
    assert replays and not policy.graphs.gave_up
    again = played(policy, 60)
    count = len(replays)
    monkeypatch.setattr(policy.graphs, "gave_up", True)
    eager = played(policy, 60)
    assert len(replays) == count
    np.testing.assert_array_equal(graphs, eager)
    np.testing.assert_array_equal(again, eager)


@pytest.mark.gpu
def test_smolvla_in_bfloat16(replays, tmp_path, monkeypatch):
    graphs = played(policy := pretrained(tmp_path, "smolvla", dtype="bfloat16"), 60)
    assert replays and not policy.graphs.gave_up and not policy.policy.needs_autocast
    monkeypatch.setattr(policy.graphs, "gave_up", True)
    np.testing.assert_array_equal(graphs, played(policy, 60))
    on_cpu = played(pretrained(tmp_path / "cpu", "smolvla", "cpu", dtype="bfloat16"), 60)
    np.testing.assert_allclose(graphs, on_cpu, atol=0.1)


@pytest.mark.gpu
def test_new_weights_are_used(replays, tmp_path):
    policy = pretrained(tmp_path)
    before = played(policy, 60)
    with torch.no_grad():
        for parameter in policy.policy.parameters():
            parameter.mul_(1.5)
    after = played(policy, 60)
    assert replays and not np.array_equal(before, after)
    policy.graphs.gave_up = True
    np.testing.assert_array_equal(after, played(policy, 60))


@pytest.mark.gpu
def test_what_cant_be_captured_is_predicted_eagerly_and_named(log_lines, tmp_path):
    policy = pretrained(tmp_path)
    predict = policy.policy.predict

    def asks(batch, noise):
        assert batch["observation.state"].abs().max().item() < 1e9
        return predict(batch, noise)

    policy.policy.predict = asks
    actions = played(policy, 5)
    assert policy.graphs.gave_up and np.isfinite(actions).all()
    assert len([line for line in log_lines if "can't be captured" in line and ".item()" in line]) <= 1
    policy.policy.predict = predict
    np.testing.assert_array_equal(actions, played(policy, 5))
