"""Told to stop: whichever ranks the signal reaches, all save the same step, and the run goes on exactly."""

import functools
import re
import signal
from pathlib import Path

import pytest

from support import ranks, runs, trouble

pytestmark = pytest.mark.ranks(waits=True)

STEPS = 10
DDP = "--parallel.strategy=ddp"
FSDP = "--parallel.strategy=fsdp"


def flags(lowdim: Path, run: Path, tiny_act: list[str], *more: str) -> list[str]:
    more = (f"--steps={STEPS}", "--save_freq=0", "--deterministic=true", *more)
    return ["train", *runs.flags(lowdim, run, tiny_act, *more)]


@pytest.fixture(scope="module")
def uninterrupted(lowdim, tiny_act, tmp_path_factory):
    """The run that nothing happened to, for each strategy."""

    @functools.cache
    def run(strategy: str) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        ranks.run(folder, 2, flags(lowdim, folder / "run", tiny_act, strategy))
        return folder / "run"

    return run


def goes_on_exactly(run: Path, folder: Path, uninterrupted: Path) -> None:
    ranks.run(folder, 2, ["resume", str(run)])
    trouble.assert_same(uninterrupted, run, STEPS)
    runs.assert_checkpoints_whole(run)


def at(step: int, number: int) -> functools.partial:
    return trouble.before_step(step, trouble.send(number))


STOPPED = {
    "SIGUSR1 to rank 0": (DDP, {0: at(5, signal.SIGUSR1)}, 75),
    "Ctrl-C": (DDP, {0: at(5, signal.SIGINT), 1: at(5, signal.SIGINT)}, 130),
    "SIGTERM to both, not at once": (DDP, {0: at(4, signal.SIGTERM), 1: at(6, signal.SIGTERM)}, 75),
    "SIGTERM to rank 1, sharded": (FSDP, {1: at(5, signal.SIGTERM)}, 75),
}


@pytest.mark.parametrize("case", STOPPED)
def test_all_ranks_save_the_same_step_and_go_on_exactly(case, uninterrupted, lowdim, tiny_act, tmp_path):
    strategy, signals, code = STOPPED[case]
    run = tmp_path / "run"
    stopped = ranks.Ranks(tmp_path / "out", 2, flags(lowdim, run, tiny_act, strategy), then=signals)
    assert stopped.end() == [code, code], stopped.errors()
    steps = re.findall(
        r"SIG\w+: stopped after step (\d+), saved as \S+ Resume with: flexor resume", stopped.errors()
    )
    assert [int(step) for step in steps] == trouble.saved_steps(run) == [trouble.steps_done(run)]
    assert "Traceback" not in stopped.errors() and trouble.steps_done(run) < STEPS
    runs.assert_checkpoints_whole(run)
    goes_on_exactly(run, tmp_path / "again", uninterrupted(strategy))


def begins_anew(command: list[str], folder: Path, run: Path, uninterrupted: Path) -> None:
    ranks.run(folder, 2, command)
    trouble.assert_same(uninterrupted, run, STEPS)


@pytest.mark.parametrize("reached", [0, 1])
def test_one_rank_is_told_to_stop_before_the_first_step(reached, uninterrupted, lowdim, tiny_act, tmp_path):
    """There is nothing to save: all end, and the same command begins the run."""
    run = tmp_path / "run"
    command = [*flags(lowdim, run, tiny_act, DDP), "--resume=auto"]
    tell = trouble.send(signal.SIGTERM)
    tell_it = {reached: functools.partial(trouble.at_call, "flexor.train.loop:build_state", 1, tell)}
    stopped = ranks.Ranks(tmp_path / "out", 2, command, then=tell_it)
    assert stopped.end() == [75, 75], stopped.errors()
    assert "SIGTERM: stopped before the first step" in stopped.errors()
    assert "Traceback" not in stopped.errors()
    begins_anew(command, tmp_path / "again", run, uninterrupted(DDP))


def test_all_are_told_to_stop_while_one_waits_for_the_other(uninterrupted, lowdim, tiny_act, tmp_path):
    """Who waits in a collective can't take notice of a signal before that has failed."""
    run, reading = tmp_path / "run", tmp_path / "reading"
    command = [*flags(lowdim, run, tiny_act, DDP), "--resume=auto"]
    action = functools.partial(trouble.touch_and_sleep, reading)
    slow = {0: functools.partial(trouble.at_call, "flexor.train.loop:build_datasets", 1, action)}
    stopped = ranks.Ranks(tmp_path / "out", 2, command, then=slow)
    stopped.all[0].wait_for(reading.exists)
    for rank in stopped.all:
        rank.send_signal(signal.SIGTERM)
    assert stopped.end() == [75, 75], stopped.errors()
    assert "Traceback" not in stopped.errors()
    begins_anew(command, tmp_path / "again", run, uninterrupted(DDP))
