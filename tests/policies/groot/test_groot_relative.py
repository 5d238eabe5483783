"""GR00T's relative actions: statistics for each step of a chunk, groups, and the way back to absolute actions."""

import numpy as np
import pytest
import torch

from flexor.core.errors import ConfigError, DatasetError
from flexor.data.dataset import open_dataset
from flexor.data.statistics import relative_action_stats_by_step
from flexor.policies.fit import fit_to_dataset, statistics
from flexor.policies.groot.config import GrootConfig
from flexor.policies.groot.modalities import Modalities
from flexor.policies.groot.relative import groups_of_dataset
from flexor.policies.processing.pipeline import StepContext
from flexor.policies.processing.relative_actions import BY_STEP
from parity.fill import uniform
from support.small_datasets import write

CHUNK = 5
TINY = {
    "base_model_path": "builtin/tiny-groot",
    "processor_name": "builtin/tiny-qwen",
    "max_state_dim": 8,
    "max_action_dim": 8,
    "chunk_size": CHUNK,
    "n_action_steps": CHUNK,
    "use_relative_actions": True,
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return open_dataset(root=write(tmp_path_factory.mktemp("relative") / "data"))


def chunks_of(dataset, relative: list[bool]) -> np.ndarray:
    """Of all samples with a whole chunk, [n, CHUNK, A]."""
    actions, states = dataset.columns["action"], dataset.columns["observation.state"]
    chunks = []
    for start, end in zip(dataset.episodes.start, dataset.episodes.end):
        for first in range(start, end - CHUNK + 1):
            chunk = actions[first : first + CHUNK].copy()
            chunk -= states[first, : chunk.shape[1]] * np.array(relative, np.float32)
            chunks.append(chunk)
    return np.stack(chunks)


@pytest.mark.parametrize("excluded", [[], ["V"]])
def test_each_step_of_a_chunk_has_its_own_statistics(excluded, dataset):
    policy = fit_to_dataset(GrootConfig(**TINY, relative_exclude_joints=excluded), dataset)
    stats = statistics(dataset, policy, use_imagenet=False)
    relative = [True, not excluded]
    expected = chunks_of(dataset, relative)
    assert np.allclose(stats[BY_STEP]["min"], expected.min(0))
    assert np.allclose(stats[BY_STEP]["std"], expected.std(0), atol=1e-6)
    assert np.allclose(stats[BY_STEP]["q99"], np.quantile(expected, 0.99, axis=0), atol=1e-6)
    assert np.array_equal(stats["action"]["min"], dataset.stats["action"]["min"])

    pack = policy.steps_before(stats)[2]
    groups = pack.modalities
    assert [group.relative for group in groups.actions] == ([True, False] if excluded else [True])
    states, actions = dataset.columns["observation.state"], dataset.columns["action"]
    batch = {"observation.state": torch.tensor(states[:1]), "action": torch.tensor(actions[:CHUNK])[None]}
    packed = pack({**batch, "task": ["open"]})["action"]
    low, high = expected.min(0), expected.max(0)
    scaled = 2 * (expected[0] - low) / (high - low) - 1
    assert np.allclose(packed[0, :, 0], scaled[:, 0], atol=1e-5)

    decode = policy.steps_after(stats)[0]
    decoded = decode({"action": packed}, StepContext(observation=batch))["action"]
    moving = [0] if excluded else [0, 1]  # percentiles cut off what is absolute
    assert torch.allclose(decoded[..., moving], batch["action"][..., moving], atol=1e-5)


def test_chunks_longer_than_any_episode_are_refused(dataset):
    with pytest.raises(DatasetError, match=r"over 99 steps: the longest episode .* has 12"):
        relative_action_stats_by_step(dataset, [True, True], 99)


def test_neighbours_are_groups_and_excluded_actions_are_alone():
    names = ["arm.a.pos", "arm.b.pos", "gripper.pos", "arm.c.pos", "base speed"]
    stats = {
        name: {
            "min": np.full((3, 5) if name == BY_STEP else 5, -1.0),
            "max": np.full((3, 5) if name == BY_STEP else 5, 1.0),
        }
        for name in ("observation.state", "action", BY_STEP)
    }
    made = groups_of_dataset(names, [True, True, False, True, False], stats)
    config = made["modality_config"]["action"]
    assert config["modality_keys"] == ["single_arm", "gripper", "single_arm_2", "base_speed"]
    assert [each["rep"] for each in config["action_configs"]] == ["RELATIVE", "ABSOLUTE"] * 2
    assert np.shape(made["raw_stats"]["relative_action"]["single_arm"]["min"]) == (3, 2)
    assert not made["use_percentiles"]


def poses(*shape: int) -> torch.Tensor:
    return torch.from_numpy(uniform("poses", (*shape, 9), -1, 1))


def hand(rep: str, form: str = "XYZ+ROT6D") -> Modalities:
    stats = {"hand": {"min": [-1.0] * 9, "max": [1.0] * 9}}
    relative = {"hand": {"min": [[-1.0] * 9] * 4, "max": [[1.0] * 9] * 4}}
    config = {"rep": rep, "type": "EEF", "format": form, "state_key": None}
    return Modalities(
        {"state": stats, "action": stats, "relative_action": relative},
        {
            "state": {"modality_keys": ["hand"]},
            "action": {"modality_keys": ["hand"], "action_configs": [config], "delta_indices": [0, 1, 2, 3]},
        },
    )


def matrix(pose: np.ndarray) -> np.ndarray:
    """The transform of a pose: rows of a rotation, made orthogonal, and a position."""
    first, second = pose[3:6], pose[6:9]
    x = first / np.linalg.norm(first)
    y = second - (second @ x) * x
    y /= np.linalg.norm(y)
    out = np.eye(4)
    out[:3, :3], out[:3, 3] = np.stack([x, y, np.cross(x, y)]), pose[:3]
    return out


def test_a_relative_pose_of_a_hand_is_a_transform_from_where_it_is():
    relative, now = poses(2, 4), poses(2).flip(1)
    absolute = hand("RELATIVE").as_absolute(relative, now).numpy()
    for sample in range(2):
        for step in range(4):
            expected = matrix(now[sample].double().numpy()) @ matrix(relative[sample, step].double().numpy())
            assert np.allclose(absolute[sample, step, :3], expected[:3, 3], atol=1e-5)
            assert np.allclose(absolute[sample, step, 3:], expected[:2, :3].flatten(), atol=1e-5)
    assert torch.equal(hand("ABSOLUTE").as_absolute(relative, now), relative)
    with pytest.raises(ConfigError, match=r"in the format 'xyz\+rotvec': only xyz"):
        hand("RELATIVE", "XYZ+ROTVEC").as_absolute(relative, now)
    with pytest.raises(ConfigError, match="does not train it"):
        hand("RELATIVE").as_relative(relative, now)
    with pytest.raises(ConfigError, match=r"Relative actions require observation\.state"):
        hand("RELATIVE").as_absolute(relative, None)
