"""The built-in task with a second camera, at the gripper."""

import numpy as np
import pytest

from flexor.core.errors import ConfigError
from flexor.data.dataset import open_dataset
from flexor.sim.expert import expert_action
from flexor.sim.record import record_dataset
from flexor.sim.task import PlaceEnv


def test_the_camera_at_the_gripper_moves_with_it():
    env = PlaceEnv(image_size=32, cameras=2)
    before = env.reset(seed=3)[0]["pixels"]
    start = env.state
    assert env.observation_space["pixels"]["wrist"].contains(before["wrist"])
    after = env.step(np.array([1.0, 1.0, 1.0]))[0]["pixels"]
    assert not np.array_equal(before["wrist"], after["wrist"])
    moved = PlaceEnv(image_size=32, cameras=2)
    moved.reset(seed=3)
    shift = 0.1  # of everything: from the gripper, all looks as before
    places = {name: tuple(x + shift for x in getattr(start, name)) for name in ("gripper", "block", "goal")}
    moved.state = type(start)(opening=start.opening, **places)
    assert np.array_equal(moved._observe()["pixels"]["wrist"], before["wrist"])
    assert not np.array_equal(moved._observe()["pixels"]["top"], before["top"])


def test_the_image_above_is_that_of_one_camera():
    one, two = PlaceEnv(image_size=32), PlaceEnv(image_size=32, cameras=2)
    assert np.array_equal(one.reset(seed=1)[0]["pixels"], two.reset(seed=1)[0]["pixels"]["top"])
    action = expert_action(one.state)
    assert np.array_equal(one.step(action)[0]["pixels"], two.step(action)[0]["pixels"]["top"])


def test_demonstrations_have_both(tmp_path):
    root = record_dataset(
        tmp_path / "data", episodes=1, image_size=32, cameras=2, actions="executed", noise=0.0
    )
    dataset = open_dataset(None, root)
    assert set(dataset.cameras) == {"observation.images.top", "observation.images.wrist"}
    images = dataset.read(np.arange(2), cameras=dataset.cameras)
    assert not np.array_equal(images["observation.images.top"], images["observation.images.wrist"])


def test_other_numbers_of_cameras_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cameras=3"):
        PlaceEnv(cameras=3)
    with pytest.raises(ConfigError, match="cameras=0"):
        record_dataset(tmp_path / "data", cameras=0)
