"""The published client of openpi controls the built-in task through the server: bit for bit as local inference."""

import io
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from flexor.evaluate.envs import make_env, observation_to_batch
from flexor.policies.pretrained import Pretrained, load_pretrained
from flexor.policies.session import Session
from support import runs
from support.limits import LIMIT_S
from support.openpi_environment import openpi_python
from support.serving import serving
from support.small_policies import small_flags

EPISODES, STEPS = 2, 9


@pytest.fixture(scope="module")
def openpi() -> Path:
    python = openpi_python()
    if isinstance(python, str):
        pytest.skip(python)
    return python


class Robot:
    """The published client, in a process of its own."""

    def __init__(self, python: Path, url: str, *more: str):
        at = urlsplit(url)
        script = Path(__file__).with_name("openpi_robot.py")
        command = [str(python), str(script), str(at.hostname), str(at.port), *more]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def act(self, observation: dict[str, np.ndarray], episode: int, reset: bool) -> np.ndarray:
        file = io.BytesIO()
        np.savez(file, prompt="put it there", reset=reset, episode=episode, **observation)
        sent = file.getvalue()
        self.process.stdin.write(len(sent).to_bytes(4, "big") + sent)
        self.process.stdin.flush()
        length = self.process.stdout.read(4)
        assert length, "the client has ended"
        return np.load(io.BytesIO(self.process.stdout.read(int.from_bytes(length, "big"))))

    def end(self) -> int:
        self.process.stdin.close()
        return self.process.wait(LIMIT_S)


def episodes(act) -> np.ndarray:
    """The actions of some episodes, [episodes, steps, A]. `act(observation, episode, step)`."""
    env, taken = make_env("place", image_size=32), []
    for episode in range(EPISODES):
        observed, _ = env.reset(seed=episode)
        for step in range(STEPS):
            action = act(observation_to_batch(observed), episode, step)
            taken.append(action)
            observed, *_ = env.step(action)
    env.close()
    return np.array(taken).reshape(EPISODES, STEPS, -1)


def local(policy: Pretrained) -> np.ndarray:
    session = Session(policy)

    def act(observation: dict[str, np.ndarray], episode: int, step: int) -> np.ndarray:
        if step == 0:
            session.reset(episode)
        return session.act(observation, "put it there")

    return episodes(act)


@pytest.fixture(scope="module", params=["act", "diffusion"])
def policy(request, dataset, tiny_act, tmp_path_factory) -> Pretrained:
    folder = tmp_path_factory.mktemp(request.param)
    tiny = (
        tiny_act
        if request.param == "act"
        else [*small_flags(request.param, folder), "--policy.device=cpu", "--policy.num_inference_steps=5"]
    )
    return load_pretrained(str(runs.train(dataset, folder / "run", tiny, "--steps=1")))


def test_the_published_client_acts_as_local_inference(openpi, policy):
    """ACT in chunks, with openpi's broker; diffusion, which sees two observations, in single actions."""
    chunks = policy.policy.config.type == "act"
    with serving(policy, reply="chunk" if chunks else "action") as (url, _):
        robot = Robot(openpi, url, *([str(policy.policy.config.action_steps)] if chunks else []))
        got = episodes(lambda observed, episode, step: robot.act(observed, episode, step == 0).reshape(-1))
        assert robot.end() == 0
    np.testing.assert_array_equal(got, local(policy))
    assert len(np.unique(got.round(6))) > 10


def test_the_published_client_reports_an_error_and_needs_the_key(openpi, policy):
    code = (
        "import sys; from openpi_client.websocket_client_policy import WebsocketClientPolicy as W\n"
        "key = sys.argv[2] if len(sys.argv) > 2 else None\n"
        "W(host='127.0.0.1', port=int(sys.argv[1]), api_key=key).infer({'nothing': 1})"
    )
    with serving(policy, api_key="secret") as (url, _):
        port = str(urlsplit(url).port)
        for more, words in (
            ((), "401"),
            (("wrong",), "401"),
            (("secret",), "The policy needs observation.state"),
        ):
            done = subprocess.run(
                [str(openpi), "-c", code, port, *more], capture_output=True, text=True, timeout=LIMIT_S
            )
            assert done.returncode == 1 and words in done.stderr, done.stderr
