"""Killed while many ranks save a checkpoint together: it is whole or not there, and the run goes on exactly."""

import functools
import random
import re
import signal
import time
from pathlib import Path

import pytest

from support import killing, ranks, runs, trouble

pytestmark = pytest.mark.ranks

STEPS = 8
WRITE_SHARD = "flexor.train.checkpoint.saver:write_shard"


def flags(lowdim: Path, run: Path, tiny_act: list[str], *more: str) -> list[str]:
    more = (f"--steps={STEPS}", "--deterministic=true", "--parallel.strategy=fsdp", *more)
    return ["train", *runs.flags(lowdim, run, tiny_act, *more)]


@pytest.fixture(scope="module")
def uninterrupted(lowdim, tiny_act, tmp_path_factory) -> Path:
    """The run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    ranks.run(folder, 2, flags(lowdim, folder / "run", tiny_act, "--save_freq=0"))
    return folder / "run"


def newest(run: Path) -> int:
    return max(trouble.saved_steps(run), default=0)


@pytest.mark.slow
@pytest.mark.parametrize(("asynchronous", "lives"), [("false", 1), ("true", 2)])
def test_killed_again_and_again_while_saving(asynchronous, lives, uninterrupted, lowdim, tiny_act, tmp_path):
    """All ranks at once; with a checkpoint at each step, most instants lie inside of a save."""
    rng, run = random.Random(asynchronous), tmp_path / "run"
    command = [
        *flags(lowdim, run, tiny_act, f"--checkpoint.async={asynchronous}"),
        "--resume=auto",
    ]
    for life in range(lives):
        more = newest(run) + 1
        living = ranks.Ranks(tmp_path / f"life{life}", 2, [*command, "--save_freq=1"])
        living.all[0].wait_for(lambda more=more: newest(run) >= more)
        time.sleep(rng.random() * 0.2)
        living.kill()
        runs.assert_checkpoints_whole(run)
    ranks.run(tmp_path / "last", 2, [*command, "--save_freq=0"])
    trouble.assert_same(uninterrupted, run, STEPS)
    runs.assert_checkpoints_whole(run)
    assert [p.name for p in (run / "checkpoints").iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("case", killing.CASES)
def test_killed_at_a_random_instant_and_each_end_is_the_same(case, tmp_path):
    """`benchmarks/kill_resume.py` does it many times."""
    killing.Victim(case, tmp_path / "victim", seed=1).kill()


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_rank_is_killed_while_it_writes_its_shard(asynchronous, lowdim, tiny_act, tmp_path):
    run = tmp_path / "run"
    more = ["--save_freq=3", f"--checkpoint.async={asynchronous}"]
    die = functools.partial(trouble.at_call, WRITE_SHARD, 2, trouble.send(signal.SIGKILL))
    killed = ranks.Ranks(
        tmp_path / "out", 2, flags(lowdim, run, tiny_act, *more), then={0: trouble.hurry, 1: die}
    )
    assert killed.end() == [70, -signal.SIGKILL], killed.errors()
    assert re.search(r"rank 1 on \S+ has sent no heartbeat for \d+ s", killed.errors()), killed.errors()
    assert "Traceback" not in killed.errors() and trouble.saved_steps(run) == [3]
    runs.assert_checkpoints_whole(run)
