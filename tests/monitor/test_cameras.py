"""Images: a camera that was unplugged is found, in the statistics of its episodes or in the images themselves."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from flexor.data.check.sampled_images import blank_by_statistics
from flexor.data.dataset import open_dataset
from flexor.data.loader.loader import to_tensors
from flexor.data.mixture.mixed import Member, join_datasets
from flexor.monitor.cameras import CameraHealth
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.processing.normalize import Normalize
from support.faulty_arm import LENGTH, TOP, WRIST, change_statistics, write_arm

CAMERAS = {TOP: TOP, WRIST: WRIST}


@pytest.fixture(scope="module")
def unplugged(tmp_path_factory) -> Path:
    return write_arm(tmp_path_factory.mktemp("arm") / "arm", blank=[2, 5, 6, 7], cameras=True)


def without_episode_statistics(root: Path) -> None:
    for file in (root / "meta" / "episodes").rglob("*.parquet"):
        table = pq.read_table(file)
        pq.write_table(table.select([n for n in table.column_names if not n.startswith("stats/")]), file)


def batch_of(dataset, rows, device="cpu", deltas=None):
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in to_tensors(dataset.read(rows, deltas)).items()
    }


def normalize_of(dataset) -> Normalize:
    features = {name: PolicyFeature(Kind.VISUAL, (3, 32, 32)) for name in CAMERAS}
    return Normalize(features, {"VISUAL": "MEAN_STD"}, {name: dataset.stats[name] for name in CAMERAS})


def test_statistics_of_episodes_say_it_at_once(unplugged):
    dataset = open_dataset(root=unplugged)
    assert blank_by_statistics(dataset, [TOP, WRIST]) == {WRIST: [2, 5, 6, 7]}
    assert blank_by_statistics(dataset.select([0, 1, 7]), [WRIST]) == {WRIST: [7]}
    (blank,) = CameraHealth(dataset, CAMERAS, {}, None).findings()
    assert blank.evidence == f"{WRIST} is blank (one colour) in episodes 2, 5 to 7"
    assert "--dataset.exclude_episodes=2,5:8" in blank.fix


def test_without_them_a_few_images_say_it_at_once(unplugged, tmp_path):
    """Also of several datasets, whose statistics of episodes are not read."""
    root = shutil.copytree(unplugged, tmp_path / "arm")
    without_episode_statistics(root)
    (blank,) = CameraHealth(open_dataset(root=root), CAMERAS, {}, None).findings()
    assert blank.evidence == f"{WRIST} is blank (one colour) in episodes 2, 5 to 7"


def test_a_frozen_camera(tmp_path):
    root = write_arm(tmp_path / "arm", frozen=[1, 4], cameras=True)
    (frozen,) = CameraHealth(open_dataset(root=root), CAMERAS, {}, None).findings()
    assert frozen.name == "frozen camera"
    assert frozen.evidence == f"{WRIST} shows the same image in episodes 1, 4, while the robot moves"
    assert "--dataset.exclude_episodes=1,4" in frozen.fix


def test_a_camera_that_sees_a_robot_at_rest_is_not_frozen(tmp_path):
    def rests(episode, states, actions):
        if episode in (1, 4):
            states[:], actions[:] = states[:1], actions[:1]

    root = write_arm(tmp_path / "arm", rests, frozen=[1, 4], cameras=True)
    assert CameraHealth(open_dataset(root=root), CAMERAS, {}, None).findings() == []


def test_later_the_images_of_batches_say_it(unplugged, tmp_path, device="cpu"):
    root = shutil.copytree(unplugged, tmp_path / "arm")
    without_episode_statistics(root)
    dataset = open_dataset(root=root)
    assert blank_by_statistics(dataset, [TOP, WRIST]) == {}
    for deltas in ({}, {TOP: [-1, 0], WRIST: [-1, 0]}):
        health = CameraHealth(dataset, CAMERAS, deltas, normalize_of(dataset))
        health.blank.clear()
        health.update([batch_of(dataset, [2 * LENGTH + 3, 5, 6], device, deltas)])
        assert health.findings() == []  # one image of an episode: it may be a start-up
        health.update([batch_of(dataset, [2 * LENGTH + 3, 2 * LENGTH + 9, 20], device, deltas)])
        (blank,) = health.findings()
        assert (blank.name, dict(health.blank)) == ("blank camera", {WRIST: {2}})


@pytest.mark.gpu
def test_images_on_a_gpu_say_it(unplugged, tmp_path):
    test_later_the_images_of_batches_say_it(unplugged, tmp_path, "cuda")


def test_a_camera_that_a_dataset_does_not_have_is_black_by_choice(unplugged, tmp_path):
    lacks = write_arm(tmp_path / "arm")
    members = [Member("a", open_dataset(root=unplugged)), Member("b", open_dataset(root=lacks))]
    mixed = join_datasets(members, on_missing_camera="mask")
    health = CameraHealth(mixed, CAMERAS, {}, None)
    assert "in episodes 2, 5 to 7 of a" in health.findings()[0].evidence
    health.blank.clear()
    health.update([batch_of(mixed, np.arange(8 * LENGTH, 8 * LENGTH + 4))])
    assert health.findings() == []
    health.update([batch_of(mixed, np.arange(5 * LENGTH, 5 * LENGTH + 4))])
    assert "blank (one colour) in episode 5 of a" in health.findings()[0].evidence


def test_statistics_of_values_up_to_255(tmp_path):
    root = write_arm(tmp_path / "arm", cameras=True)
    dataset = open_dataset(root=root)
    health = CameraHealth(dataset, CAMERAS, {}, normalize_of(dataset))
    health.update([batch_of(dataset, [0, 20, 40])])
    assert health.findings() == []
    dataset = open_dataset(root=change_statistics(root, TOP, lambda name, value: value * 255))
    health = CameraHealth(dataset, CAMERAS, {}, normalize_of(dataset))
    assert health.findings() == []
    health.update([batch_of(dataset, [0, 20, 40])])
    health.update([batch_of(dataset, [1, 21, 41])])
    (wrong,) = health.findings()
    assert wrong.name == "wrong image statistics" and wrong.evidence.startswith(f"{TOP} has images")
