"""`flexor serve` as a program: from a checkpoint to a robot's actions, and to its end."""

import json
import signal

import numpy as np
import pytest
import torch
from websockets.exceptions import WebSocketException

from flexor.cli.main import main
from flexor.cli.serve import read_names
from flexor.core.errors import ConfigError
from flexor.evaluate.play import full_float32
from flexor.policies.pretrained import load_pretrained
from flexor.policies.session import Session
from flexor.serve.job import ServeJob
from flexor.serve.open import open_predictor
from flexor.serve.request import PolicyRequest
from flexor.serve.settings import ServeSettings
from support import runs
from support.limits import LIMIT_S, retried
from support.serving import RawClient, get
from support.small_policies import small_flags

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def run(lowdim, tiny_act, tmp_path_factory):
    return runs.train(lowdim, tmp_path_factory.mktemp("serve") / "run", tiny_act, "--steps=1")


def test_a_checkpoint_is_served(run):
    policy = load_pretrained(str(run))
    inputs = policy.policy.config.observed
    observed = {name: np.linspace(-1, 1, *f.shape, dtype=np.float32) for name, f in inputs.items()}
    first = next(iter(inputs))
    names = [
        f"--map={first}=robot/joints",
        "--device=cpu",
        "--policy.n_action_steps=2",
        "--allow-host=arm.example",
    ]
    process = runs.start("serve", str(run), "--port=0", "--json", *names)
    try:
        info = json.loads(process.stdout.readline())
        spans = info["metadata"]["action_range"]
        assert all(low < high for low, high in zip(spans["low"], spans["high"], strict=True))
        assert info["metadata"]["action_steps"] == 2 and "robot/joints" in info["metadata"]["inputs"]

        def ask() -> np.ndarray:
            with RawClient(info["url"]) as robot:
                return robot.ask({**observed, "robot": {"joints": observed[first]}, first: None})["actions"]

        # the program has its own time limits, which a busy machine may reach
        got = retried(ask, OSError, WebSocketException)
        assert retried(lambda: get(info["url"], "/healthz"), OSError) == (200, "OK\n")
        for name, status in (("arm.example", 200), ("evil.example", 421)):
            assert retried(lambda name=name: get(info["url"], "/healthz", Host=name), OSError)[0] == status
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.communicate()
    session = Session(policy)
    assert len(got) == len(policy.policy.config.action_deltas)
    np.testing.assert_allclose(got[0], session.act(observed), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port=99999"], "--port=99999 must be from 0 to 65535"),
        (["--map=observation.state"], "--map observation.state: give the policy's name and the client's"),
        (["--map=observation.stat=x"], "the policy has no such input"),
        (["--tls-cert=none.pem", "--tls-key=none.pem"], "Can't read the certificate none.pem"),
        (["--tls-cert=none.pem"], "must be given together"),
        (["--allow-host=ws://robot"], "--allow-host=ws://robot: give a name alone"),
        (["--api-key="], "The API key must be ASCII text that is not empty"),
        (["--steps=3"], "Unknown setting --steps"),
        (["--device=cuda:77"], "is not available"),
    ],
)
def test_what_is_wrong_is_said_before_anything_listens(run, flags, words, capsys):
    assert main(["serve", str(run), "--port=0", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.fixture
def same_rounding():
    """`open_predictor` sets it for its process."""
    with full_float32():
        yield


def test_precision_and_compiling(run, same_rounding, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        "flexor.serve.open.compile_blocks", lambda policy, device: compiled.append(device.type)
    )
    settings = ServeSettings(max_batch=6)
    plain = open_predictor(str(run), settings, device="cpu", flags=["--policy.n_action_steps=3"])
    assert plain.autocast is None and plain.sizes == [] and plain.config.action_steps == 3
    rounded = open_predictor(str(run), settings, device="cpu", dtype="bfloat16", compiled=True)
    assert rounded.autocast is torch.bfloat16 and rounded.sizes == [1, 2, 4, 6] and compiled == ["cpu"]
    rounded.warm()
    observed = {name: np.ones(f.shape, np.float32) for name, f in plain.config.observed.items()}
    answers = []
    for predictor in (plain, rounded):
        job = ServeJob(PolicyRequest(observed, False, "", None), predictor.session(), 0.0)
        predictor.answer([job])
        assert job.error is None
        answers.append(job.actions)
    np.testing.assert_allclose(answers[1], answers[0], atol=0.2, rtol=0.2)
    assert not np.array_equal(*answers)
    open_predictor(str(run), settings, device="cpu", dtype="tf32")
    assert torch.backends.cudnn.allow_tf32


def test_a_policy_with_a_dtype_of_its_own_keeps_its_weights_in_it(tmp_path, dataset, same_rounding):
    run = runs.train(
        dataset, tmp_path / "run", small_flags("pi0", tmp_path), "--steps=1", "--policy.device=cpu"
    )
    predictor = open_predictor(str(run), ServeSettings(), device="cpu", dtype="bfloat16")
    assert predictor.autocast == torch.bfloat16 and predictor.describe()["language"]
    assert any(weight.dtype == torch.bfloat16 for weight in predictor.pretrained.policy.parameters())
    predictor.warm()  # among others a chunk that continues another


def test_names_are_mapped_once():
    assert read_names(["a=b", "c=d/e=f"]) == {"a": "b", "c": "d/e=f"}
    with pytest.raises(ConfigError, match="is given twice"):
        read_names(["a=b", "a=c"])
