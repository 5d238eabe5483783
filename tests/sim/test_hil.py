"""gym_hil's arm, where it is installed: seeded fully, solved by the expert, and brought back after a stop."""

import importlib.util

import numpy as np
import pytest

from flexor.cli.main import main
from flexor.config.environment import EnvConfig
from flexor.evaluate.envs import make_env, open_env
from flexor.sim import hil
from support import online

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gym_hil") is None, reason="the extra hil is not installed"
)
KWARGS = {"image_obs": False, "random_block_position": True}


@pytest.fixture(scope="module")
def env():
    try:
        made = open_env(EnvConfig(type="gym_hil", kwargs=KWARGS))
    except Exception as error:  # as MuJoCo and the graphics library say it
        pytest.skip(f"MuJoCo can't render here: {error!r}")
    yield made
    made.close()


def test_an_episode_is_a_function_of_its_seed(env):
    np.random.seed(5)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    starts, ends = [], []
    for seed in (3, 4, 3):
        starts.append(env.reset(seed=seed)[0]["environment_state"])
        for step in range(4):
            action = np.array([1, -1, -0.5, step % 3], np.float32)
            observation = env.step(action)[0]
        ends.append(observation["agent_pos"])
    assert np.array_equal(starts[0], starts[2]) and not np.array_equal(starts[0], starts[1])
    assert np.array_equal(ends[0], ends[2])
    assert np.array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_the_expert_picks_up_the_cube_within_what_the_environment_declares(env):
    space = env.observation_space
    observation, _ = env.reset(seed=11)
    for _ in range(40):
        assert all(np.isfinite(space[name].low).all() for name in space)
        assert space["environment_state"].contains(observation["environment_state"])
        observation, reward, terminated, _, info = env.step(hil.expert_action(env.unwrapped))
        if terminated:
            break
    assert reward == 1.0 and info["is_success"] and info["discrete_penalty"] == 0.0
    assert env.render().shape == (128, 256, 3)


def test_settings_that_gym_hil_has_itself():
    flags = {"ee_step_size": {"x": 0.01, "y": 0.01, "z": 0.01}}
    with make_env("gym_hil", **KWARGS, **flags) as env:
        start = env.reset(seed=0)[0]["agent_pos"][-3:]
        for _ in range(3):
            moved = env.step(np.array([0, 1, 0, 1], np.float32))[0]["agent_pos"][-3:] - start
    assert 0.005 < moved[1] < 0.032


@pytest.mark.usefixtures("env")
def test_a_run_that_was_stopped_goes_on_in_the_middle_of_an_episode(tmp_path):
    more = [
        "--env.type=gym_hil",
        "--env.kwargs={image_obs: false, random_block_position: true}",
        "--policy.num_discrete_actions=3",
        "--policy.discrete_critic_network_kwargs={hidden_dims: [8]}",
        "--steps=12",
    ]
    online.train(tmp_path / "run", None, *more)
    assert main(["resume", str(tmp_path / "run"), "--steps=24"]) == 0
    records = online.records(tmp_path / "run")
    assert (records["is_step"] == 0).sum() == 1 and (records["is_step"] == 1).sum() == 24
