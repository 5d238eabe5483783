"""Pushing with several processes, and when a run is told to stop."""

import functools
import signal
from pathlib import Path

import pytest

from support import ranks, runs, trouble
from support.hub_server import HubServer, log_in

pytestmark = pytest.mark.ranks(waits=True)

FIRST, SECOND = "hf_of_the_first_process", "hf_of_the_second_process"


@pytest.fixture
def server():
    with HubServer() as server:
        server.tokens = {FIRST, SECOND}
        yield server


def entered(server: HubServer, token: str, then: functools.partial | None = None) -> functools.partial:
    return functools.partial(_enter, server.address, token, then)


def _enter(address: str, token: str, then: functools.partial | None) -> None:
    log_in(address, token)
    if then is not None:
        then()


def flags(lowdim: Path, run: Path, tiny_act: list[str], *more: str) -> list[str]:
    return ["train", *runs.flags(lowdim, run, tiny_act, "--policy.repo_id=ann/run", "--steps=4", *more)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_only_the_first_process_pushes(strategy, server, lowdim, tiny_act, tmp_path):
    more = (f"--parallel.strategy={strategy}", "--save_checkpoint_to_hub=true")
    then = {0: entered(server, FIRST), 1: entered(server, SECOND)}
    both = ranks.Ranks(tmp_path / "out", 2, flags(lowdim, tmp_path / "run", tiny_act, *more), then=then)
    assert both.end() == [0, 0], both.errors()
    assert server.seen_tokens == {FIRST}
    remote = server.model("ann/run").files
    assert "model.safetensors" in remote and "checkpoints/000004/training_state/manifest.json" in remote
    saved = tmp_path / "run/checkpoints/000004"
    here = {path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file()}
    assert {f"checkpoints/000004/{name}" for name in here} <= remote.keys()
    # what was pushed is a run that goes on, on another number of processes
    words = ["resume", "hub:ann/run", f"--output_dir={tmp_path / 'resumed'}", "--steps=5"]
    words += ["--save_checkpoint_to_hub=false", "--policy.push_to_hub=false", f"--dataset.root={lowdim}"]
    resumed = ranks.Ranks(tmp_path / "again", 1, words, then={0: entered(server, FIRST)})
    assert resumed.end() == [0], resumed.errors()
    assert trouble.saved_steps(tmp_path / "resumed") == [4, 5]


def test_a_wrong_token_ends_all_processes_at_the_start(server, lowdim, tiny_act, tmp_path):
    server.tokens = set()
    then = {0: entered(server, FIRST), 1: entered(server, SECOND)}
    both = ranks.Ranks(tmp_path / "out", 2, flags(lowdim, tmp_path / "run", tiny_act), then=then)
    assert both.end() == [1, 1]
    assert both.errors().count("does not accept your token") == 1 and not (tmp_path / "run").exists()


def test_a_run_that_is_told_to_stop_pushes_what_it_saves(server, lowdim, tiny_act, tmp_path):
    then = {0: entered(server, FIRST, trouble.before_step(2, trouble.send(signal.SIGTERM)))}
    more = ("--save_checkpoint_to_hub=true",)
    single = ranks.Ranks(tmp_path / "out", 1, flags(lowdim, tmp_path / "run", tiny_act, *more), then=then)
    assert single.end() == [75], single.errors()
    saved = [path.name for path in (tmp_path / "run/checkpoints").iterdir() if path.name.isdigit()]
    assert [*server.model("ann/run").tags] == saved and saved != ["000004"]
