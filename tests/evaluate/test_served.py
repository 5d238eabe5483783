"""`flexor eval --server` and `flexor record --server`: as without a server, and errors that say what to do."""

import json
import signal
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexor.cli.main import main
from flexor.core.errors import FlexorError
from flexor.data.dataset import open_dataset
from flexor.evaluate import robot_record
from flexor.evaluate.envs import make_env, observation_to_batch
from flexor.evaluate.robot_record import RobotSession, make_robot, record_robot
from flexor.evaluate.rollout import PolicyActor, rollout
from flexor.evaluate.served import ServedActor, ServerAddress, record_served
from flexor.policies.pretrained import load_pretrained
from flexor.policies.session import Session
from flexor.serve.predictor import Predictor
from flexor.sim.record import EVAL_SEED_START
from flexor_client import RealTimePlayer
from support import runs, small_resnet
from support.limits import LIMIT_S
from support.serving import SIZE, numbers, serving
from support.small_policies import small_flags

place = partial(make_env, "place")
SEEDS = [EVAL_SEED_START + number for number in range(3)]


@pytest.fixture(scope="module")
def act(dataset, tiny_act, tmp_path_factory) -> Path:
    return runs.train(dataset, tmp_path_factory.mktemp("served") / "act", tiny_act, "--steps=2")


def played(actor, batch_size: int = 1):
    episodes = rollout(place, actor, SEEDS, 11, batch_size=batch_size)
    return [(episode.seed, episode.steps, episode.return_, episode.max_reward) for episode in episodes]


@pytest.mark.parametrize("overrides", [{}, {"n_action_steps": 1, "temporal_ensemble_coeff": 0.01}])
def test_an_episode_is_the_same_as_without_a_server(act, overrides):
    policy = load_pretrained(str(act), "cpu", overrides)
    with serving(policy) as (url, _):
        actor = ServedActor(ServerAddress(url))
        assert played(actor) == played(PolicyActor(policy))
        together = played(actor, batch_size=3)
        np.testing.assert_allclose(together, played(PolicyActor(policy)), rtol=1e-4)
        actor.close()


def test_a_policy_with_noise_and_a_history_too(dataset, tmp_path):
    flags = [*small_flags("diffusion", tmp_path / "files"), small_resnet.FLAG, "--policy.device=cpu"]
    flags += ["--policy.crop_shape=null", "--policy.num_inference_steps=2"]
    run = runs.train(dataset, tmp_path / "run", flags, "--steps=2")
    policy = load_pretrained(str(run))
    assert policy.policy.config.observation_deltas == [-1, 0]
    with serving(policy) as (url, _):
        actor = ServedActor(ServerAddress(url))
        assert played(actor) == played(PolicyActor(policy))
        actor.close()


@pytest.mark.ranks
def test_from_the_command_line_against_a_server_process(act, tmp_path, capsys):
    settings = [
        "--env.type=place",
        "--eval.n_episodes=2",
        "--eval.batch_size=1",
        "--env.max_steps=12",
        "--json",
    ]
    assert main(["eval", str(act), "--policy.device=cpu", *settings]) == 0
    local = json.loads(capsys.readouterr().out)
    server = runs.Forked(tmp_path / "server", "serve", str(act), "--port=0", "--device=cpu", "--json")
    try:
        server.wait_for(lambda: server.files[0].exists() and server.files[0].read_text().endswith("\n"))
        url = json.loads(server.files[0].read_text())["url"]
        assert main(["eval", f"--server={url}", *settings]) == 0
        served = json.loads(capsys.readouterr().out)
        assert served.pop("server") == url and local.pop("policy")
        assert served == local
        assert main(["eval", f"--server={url}", "--jpeg=95", *settings]) == 0
        assert json.loads(capsys.readouterr().out)["episodes"] == 2
        words = [f"--server={url}", "--episodes=2", "--seed=40", "--env.max_steps=9", "--json"]
        assert main(["record", str(tmp_path / "data"), *words]) == 0
        assert json.loads(capsys.readouterr().out)["frames"] == 18
    finally:
        server.send_signal(signal.SIGTERM)
        server.end()
    assert main(["data", "check", str(tmp_path / "data")]) == 0
    recorded = open_dataset(root=tmp_path / "data")
    rows = recorded.read(np.arange(18))
    session, env = Session(load_pretrained(str(act)), 0, 41), place()
    observed = observation_to_batch(env.reset(seed=41)[0])
    for step in range(9):  # the second episode
        np.testing.assert_array_equal(rows["observation.state"][9 + step], observed["observation.state"])
        action = session.act(observed, env.unwrapped.task_description)
        np.testing.assert_array_equal(rows["action"][9 + step], action)
        observed = observation_to_batch(env.step(action)[0])
    assert [*rows["next.done"].reshape(-1)] == [*[False] * 8, True] * 2


def test_episodes_that_fail_can_be_left_out(act, tmp_path):
    settings = {"episodes": 2, "max_steps": 3, "successes_only": True}
    none = pytest.raises(FlexorError, match="None of 2 episodes succeeded")
    with serving(load_pretrained(str(act))) as (url, _), none:
        record_served(tmp_path / "data", ServerAddress(url), place, **settings)
    assert not (tmp_path / "data/meta/info.json").exists()


def test_errors_of_the_connection_are_told_without_a_traceback(act, capsys):
    def fails(*words: str) -> str:
        assert main([*words]) in (1, 2)
        return capsys.readouterr().err

    settings = ["--env.type=place", "--eval.n_episodes=3", "--env.max_steps=3"]
    assert "ws://HOST:PORT" in fails("eval", "--server=localhost:8000", *settings)
    assert "name one of them" in fails("eval", str(act), "--server=ws://127.0.0.1:1", *settings)
    assert "Give this to `flexor serve`" in fails("eval", "--server=ws://x", "--policy.device=cpu", *settings)
    assert "--jpeg is for a server" in fails("eval", str(act), "--jpeg=90", *settings)
    assert "needs --server" in fails("record", "nowhere", "--env.type=place")
    assert "not disturbed" in fails("record", "nowhere", "--server=ws://x", "--noise=0.5")
    with serving(numbers(), api_key="secret") as (url, _):
        assert "key is missing or wrong" in fails("eval", f"--server={url}", *settings)
        assert "observation.images.top" in fails(
            "eval", f"--server={url}", "--api-key=secret", "--eval.batch_size=1", *settings
        )


ARM = """
import numpy as np

class Arm:
    name = "arm"
    observation_features = {"a": float, "b": float, "c": float, "top": (16, 16, 3)}
    action_features = {"a": float, "b": float}

    def __init__(self):
        self.joints, self.calls = {"a": 0.0, "b": 0.0}, []

    def connect(self):
        self.calls.append("connect")

    def disconnect(self):
        self.calls.append("disconnect")

    def get_observation(self):
        return {**self.joints, "c": 1.0, "top": np.zeros((16, 16, 3), np.uint8)}

    def send_action(self, action):
        self.joints = dict(action)
        return action

def make():
    return Arm()
"""


def answered_at_once(work: Callable[[], Any]) -> Future[Any]:
    """In place of a thread: the robot has an action at every step, however busy the machine is."""
    future: Future[Any] = Future()
    future.set_result(work())
    return future


def test_a_robot_is_recorded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(robot_record, "ROBOT_ANSWER_S", LIMIT_S)
    player = partial(RealTimePlayer, start=answered_at_once, lost_after_s=LIMIT_S)
    monkeypatch.setattr(robot_record, "RealTimePlayer", player)
    policy = numbers(image=(16, 16))
    (tmp_path / "arm.py").write_text(ARM)
    words = [
        f"--robot={tmp_path / 'arm.py'}:make",
        "--task=Wave.",
        "--fps=50",
        "--seconds=0.4",
        "--episodes=2",
    ]
    with serving(policy) as (url, _):
        words += [f"--server={url}", "--rename=top=observation.images.top", "--max-step=0.5", "--json"]
        assert main(["record", str(tmp_path / "data"), *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["episodes"] == 2 and 20 <= result["frames"] <= 40
    assert main(["data", "check", str(tmp_path / "data")]) == 0
    recorded = open_dataset(root=tmp_path / "data")
    rows = recorded.read(np.arange(result["frames"]))
    done, state = rows["action"], rows["observation.state"]
    assert np.abs(done[0]).max() <= 0.5  # from 0, at most half a unit
    length = result["frames"] // 2
    np.testing.assert_allclose(state[1 : length - 1, :2], done[: length - 2], atol=1e-6)
    absurd = Predictor(policy)
    absurd.action_range = {"low": [-0.1, -0.1], "high": [0.1, 0.1]}
    with serving(absurd) as (url, _):
        words[5] = f"--server={url}"
        assert main(["record", str(tmp_path / "none"), *words]) == 1
        assert "in the training data it is from -0.1 to 0.1" in capsys.readouterr().err
        assert main(["record", str(tmp_path / "any"), *words, "--beyond-training=any"]) == 0
        assert main(["record", str(tmp_path / "far"), *words, "--beyond-training=1e9"]) == 0


def test_errors_keep_what_is_recorded(tmp_path, capsys):
    (tmp_path / "arm.py").write_text(ARM)
    robot = make_robot(f"{tmp_path / 'arm.py'}:make")

    def fail(number: int) -> None:
        if number == 2:
            raise FlexorError("the camera is unplugged.")

    session = RobotSession("Wave.", fps=100, episodes=4, seconds=0.2)
    robot.observation_features["top"] = (SIZE, SIZE, 3)
    look = robot.get_observation
    robot.get_observation = lambda: {**look(), "top": np.zeros((SIZE, SIZE, 3), np.uint8)}
    with (
        serving(numbers()) as (url, _),
        pytest.raises(FlexorError, match=r"unplugged\. 2 episodes before it are kept"),
    ):
        record_robot(tmp_path / "data", ServerAddress(url), robot, session, before_episode=fail)
    assert robot.calls == ["connect", "disconnect"]
    assert main(["data", "check", str(tmp_path / "data")]) == 0
    capsys.readouterr()
    rest = ["--task=x", "--fps=9", "--seconds=1", "--server=ws://x"]
    for words, message in (
        ([f"--robot={tmp_path / 'arm.py'}:made"], "also give --task, --fps, --seconds, --server"),
        ([f"--robot={tmp_path / 'arm.py'}:made", *rest], "no function made"),
        (["--robot=none.py:make", *rest], "can't be imported"),
        ([f"--robot={tmp_path / 'arm.py'}:make", "--rename=top", *rest], "give NAME=INPUT"),
    ):
        assert main(["record", str(tmp_path / "other"), *words]) == 2
        assert message in capsys.readouterr().err
