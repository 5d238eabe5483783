"""Steps between an environment and the policy: what each changes, and that training and evaluation have the same."""

import gymnasium
import numpy as np
import pytest
from PIL import Image

from flexor.config.environment import EnvConfig
from flexor.config.parse import config_from_flags, nest, parse_flags
from flexor.core.errors import ConfigError
from flexor.core.typed import from_plain
from flexor.evaluate import env_steps
from flexor.evaluate.envs import observation_to_batch, open_env
from flexor.evaluate.report import evaluate_policy
from flexor.sim.task import PlaceEnv
from support import online


def settings(*flags: str) -> EnvConfig:
    return from_plain(EnvConfig, nest(parse_flags(flags))["env"], "env")


def place(*flags: str, size: int = 40) -> gymnasium.Env:
    return open_env(settings("--env.type=place", f"--env.kwargs.image_size={size}", *flags))


class Arm(gymnasium.Env):
    """Two cameras, a position and a gripper; it goes where it is told to."""

    metadata = {"render_fps": 4}  # noqa: RUF012
    action_space = gymnasium.spaces.Box(np.array([-5, -5, 0], "f4"), np.array([5, 5, 2], "f4"))

    def __init__(self, render_mode=None):
        self.state = np.zeros(3, np.float32)

    def _observation(self):
        rows = np.arange(30, dtype=np.uint8)[:, None, None] * np.ones((1, 20, 3), np.uint8)
        return {"pixels": {"front": rows, "wrist": rows + 100}, "agent_pos": self.state.copy()}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state[:2], self.state[2] = self.np_random.uniform(-1, 1, 2), 0
        return self._observation(), {}

    def step(self, action):
        self.state[:2] = action[:2]
        self.state[2] = {0: 80.0, 1: self.state[2], 2: 0.0}[round(float(action[2]))]
        return self._observation(), 0.0, False, False, {}


@pytest.fixture(autouse=True)
def arm():
    gymnasium.register("Arm-v0", entry_point=Arm)
    yield
    gymnasium.registry.pop("Arm-v0")


def test_images_are_cropped_by_camera_and_resized():
    group = "--env.processor.image_preprocessing"
    env = open_env(
        settings(
            "--env.type=Arm-v0",
            f"{group}.crop_params_dict={{observation.images.front: [4, 2, 8, 16]}}",
            f"{group}.resize_size=[6, 10]",
        )
    )
    for observation in (env.reset(seed=0)[0], env.step(np.ones(3, "f4"))[0]):
        batch = observation_to_batch(observation)
        front, wrist = batch["observation.images.front"], batch["observation.images.wrist"]
        assert front.shape == wrist.shape == (3, 6, 10) and front.dtype == np.uint8
        cropped = np.arange(4, 12, dtype=np.uint8)[:, None].repeat(16, 1)
        expected = np.asarray(Image.fromarray(cropped).resize((10, 6), Image.Resampling.BILINEAR))
        assert np.array_equal(front[0], expected)
        assert wrist.min() >= 100 and wrist.max() <= 129


@pytest.mark.parametrize(
    ("crop", "says"),
    [
        ("{observation.image: [0, 0, 41, 8]}", "40 rows"),
        ("{observation.images.top: [0, 0, 8, 8]}", "cameras are"),
    ],
)
def test_crops_that_are_impossible(crop, says):
    with pytest.raises(ConfigError, match=says):
        place(f"--env.processor.image_preprocessing.crop_params_dict={crop}").reset(seed=0)


def test_actions_are_steps_from_where_the_end_effector_is():
    group = "--env.processor.inverse_kinematics"
    env = open_env(
        settings(
            "--env.type=Arm-v0",
            f"{group}.end_effector_step_sizes={{x: 0.1, y: 0.2}}",
            f"{group}.end_effector_bounds={{min: [-2, -2], max: [2, 2]}}",
        )
    )
    assert env.action_space.low.tolist() == [-1, -1, 0] and env.action_space.high.tolist() == [1, 1, 2]
    assert env.get_wrapper_attr("action_names") == ("delta_x", "delta_y", "gripper")
    start = env.reset(seed=1)[0]["agent_pos"]
    state = env.step(np.array([0.5, -1, 1], "f4"))[0]["agent_pos"]
    assert np.allclose(state[:2], start[:2] + np.array([0.05, -0.2]))
    for _ in range(40):
        state = env.step(np.array([1, 1, 1], "f4"))[0]["agent_pos"]
    assert np.allclose(state[:2], [2, 2])


def test_a_gripper_that_opens_or_closes_costs_something():
    more = ("--env.processor.gripper.gripper_penalty=-0.05", "--env.processor.max_gripper_pos=80")
    env = open_env(settings("--env.type=Arm-v0", *more))
    env.reset(seed=0)
    penalties = [
        env.step(np.array([0, 0, choice], "f4"))[4]["discrete_penalty"] for choice in (2, 1, 0, 0, 1, 2, 2)
    ]
    assert penalties == [0, 0, -0.05, 0, 0, -0.05, 0]
    with pytest.raises(ConfigError, match=r"0 \(close\) to 2"):
        place("--env.processor.gripper.gripper_penalty=-0.05")


def test_time_is_up_after_seconds():
    env = open_env(settings("--env.type=Arm-v0", "--env.processor.reset.control_time_s=1.25"))
    env.reset(seed=0)
    assert [env.step(np.zeros(3, "f4"))[3] for _ in range(5)] == [False, False, False, False, True]
    assert env.spec.max_episode_steps == 5


def test_episodes_begin_alike_or_after_a_pause(monkeypatch):
    env = place("--env.processor.reset.fixed_seed=3")
    assert np.array_equal(env.reset(seed=1)[0]["agent_pos"], env.reset(seed=2)[0]["agent_pos"])
    assert np.array_equal(env.reset(seed=1)[0]["agent_pos"], PlaceEnv().reset(seed=3)[0]["agent_pos"])
    pauses = []
    monkeypatch.setattr(env_steps.time, "sleep", pauses.append)
    place("--env.processor.reset.reset_time_s=2.5").reset(seed=0)
    assert pauses == [2.5]


def test_a_run_records_and_evaluates_with_its_steps(tmp_path):
    """They are settings of the run, which `flexor eval` takes from it."""
    steps = [
        "--env.processor.inverse_kinematics.end_effector_step_sizes={x: 0.1, y: 0.1}",
        "--env.processor.reset.control_time_s=1.5",
        "--env.processor.reset.fixed_seed=4",
    ]
    online.train(tmp_path / "run", None, *steps, "--steps=35")
    records = online.records(tmp_path / "run")
    firsts = records["observation.state"][records["is_step"] == 0]
    assert len(firsts) == 3 and (firsts == firsts[0]).all()
    assert np.flatnonzero(records["truncated"][records["is_step"] == 1]).tolist() == [14, 29]
    result, _ = evaluate_policy(str(tmp_path / "run"), ["--eval.n_episodes=2", "--policy.device=cpu"])
    assert result["mean_steps"] == 15


def test_lerobots_settings_of_a_file(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "policy: {type: sac}\nenv: {type: place, processor: {reset: {control_time_s: 3}, gripper: null}}\n"
    )
    config = config_from_flags(
        parse_flags([f"--config={tmp_path / 'run.yaml'}", "--env.processor.reset.fixed_seed=1"])
    )
    assert config.env.processor.reset.control_time_s == 3 and config.env.processor.reset.fixed_seed == 1
