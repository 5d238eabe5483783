"""Runs of WALL-X: in fast mode, and started from a checkpoint whose model is gone."""

import shutil

import pytest

from flexor.cli.main import main
from flexor.plan.trace.trace import trace_step
from flexor.policies.pretrained import load_pretrained
from parity.pi0_fast.cases import make_fast
from support import runs
from support.plans import H200, settings
from support.small_policies import small_flags


@pytest.fixture
def flags(tmp_path) -> list[str]:
    return ["--policy.device=cpu", *small_flags("wall_x", tmp_path / "models")]


@pytest.mark.slow
def test_a_run_in_fast_mode(dataset, flags, tmp_path):
    make_fast(tmp_path / "fast")
    fast = ["--policy.prediction_mode=fast", f"--policy.action_tokenizer_path={tmp_path / 'fast'}"]
    more = [*fast, "--steps=4", "--save_freq=2", "--policy.max_decoding_steps=8"]
    uninterrupted = runs.train(dataset, tmp_path / "run", flags, *more)
    cut = runs.cut_back(uninterrupted, tmp_path / "cut", 2)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(uninterrupted, cut, 4)
    short = ["--eval.n_episodes=1", "--env.max_steps=4", "--env.type=place"]
    assert main(["eval", str(uninterrupted), *short]) == 0


def test_a_run_from_a_checkpoint_whose_model_is_gone(dataset, flags, tmp_path):
    first = runs.train(dataset, tmp_path / "first", flags, "--steps=1")
    shutil.rmtree(tmp_path / "models")
    path = ["--policy.device=cpu", f"--policy.path={first}"]
    second = runs.train(dataset, tmp_path / "second", path, "--steps=1")
    assert load_pretrained(str(second)).policy.config.dtype == "float32"


def test_words_are_planned():
    """No values are read on the host, so that a step can be a CUDA graph."""
    config = settings("wall_x", policy={"prediction_mode": "fast", "chunk_size": 8, "n_action_steps": 8})
    trace = trace_step(config, 2, H200)
    assert trace.sync_points == [] and trace.parameters > 0
