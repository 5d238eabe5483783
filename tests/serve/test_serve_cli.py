"""`flexor serve` as a program: from a checkpoint to a robot's actions, and to its end."""

import json
import signal
import urllib.request

import numpy as np
import pytest

from flexor.cli.main import main
from flexor.cli.serve import read_names
from flexor.core.errors import ConfigError
from flexor.policies.pretrained import load_pretrained
from flexor.policies.session import Session
from support import runs
from support.serving import Talk

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def run(lowdim, tiny_act, tmp_path_factory):
    return runs.train(lowdim, tmp_path_factory.mktemp("serve") / "run", tiny_act, "--steps=1")


def test_a_checkpoint_is_served(run):
    policy = load_pretrained(str(run))
    inputs = policy.policy.config.observed
    seen = {name: np.linspace(-1, 1, *f.shape, dtype=np.float32) for name, f in inputs.items()}
    first = next(iter(inputs))
    names = [f"--map={first}=robot/joints", "--device=cpu", "--policy.n_action_steps=2"]
    process = runs.start("serve", str(run), "--port=0", "--json", *names)
    try:
        said = json.loads(process.stdout.readline())
        assert said["metadata"]["action_steps"] == 2 and "robot/joints" in said["metadata"]["inputs"]
        with Talk(said["url"]) as robot:
            got = robot.ask({**seen, "robot": {"joints": seen[first]}, first: None})["actions"]
        with urllib.request.urlopen(said["url"].replace("ws", "http", 1) + "/healthz") as answer:
            assert answer.read() == b"OK\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
    session = Session(policy)
    assert len(got) == len(policy.policy.config.action_deltas)
    np.testing.assert_allclose(got[0], session.act(seen), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port=99999"], "--port=99999 must be from 0 to 65535"),
        (["--map=observation.state"], "--map observation.state: give the policy's name and the client's"),
        (["--map=observation.stat=x"], "the policy has no such input"),
        (["--tls-cert=none.pem", "--tls-key=none.pem"], "Can't read the certificate none.pem"),
        (["--tls-cert=none.pem"], "must be given together"),
        (["--steps=3"], "Unknown setting --steps"),
        (["--device=cuda:77"], "is not available"),
    ],
)
def test_what_is_wrong_is_said_before_anything_listens(run, flags, words, capsys):
    assert main(["serve", str(run), "--port=0", *flags]) == 2
    assert words in capsys.readouterr().err


def test_names_are_mapped_once():
    assert read_names(["a=b", "c=d/e=f"]) == {"a": "b", "c": "d/e=f"}
    with pytest.raises(ConfigError, match="is given twice"):
        read_names(["a=b", "a=c"])
