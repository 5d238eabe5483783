"""How a run of many processes fails: the others end too, and it is said who failed, where and why."""

import functools
import itertools
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexor.sim.record import record_dataset
from support import disks, ranks, runs, trouble
from support.disks import leave_free
from support.limits import FOREVER_S

pytestmark = pytest.mark.ranks(waits=True)

HOST = socket.gethostname()
HUNG = 70
KILLED = -signal.SIGKILL
PATIENCE_S = 45  # half of it without a word is silence: on a busy machine, a rank may get no core for long
PATIENCE = f"--parallel.timeout_s={PATIENCE_S}"
TOGETHER = {0: trouble.wait_for_all, 1: trouble.wait_for_all}
DDP = ["--parallel.strategy=ddp"]
FSDP = ["--parallel.strategy=fsdp"]


def train(dataset: Path, run: Path, tiny_act: list[str], *more: str) -> list[str]:
    return ["train", *runs.flags(dataset, run, tiny_act, "--steps=12", "--save_freq=4", *more)]


@pytest.fixture
def flags(lowdim, tiny_act, tmp_path):
    return functools.partial(train, lowdim, tmp_path / "run", tiny_act)


LONG = [
    "flexor.policies.act.policy:ACT.load_backbone",
    "flexor.evaluate.play:play",
    "flexor.train.checkpoint.folder:_write_manifest",
    "flexor.monitor.trackers:JsonlTracker.close",  # as an upload of the last metrics would
]


def start_taking_long(tiny_act: list[str], folder: Path) -> list[ranks.Ranks]:
    obs_type = "environment_state_agent_pos"  # small steps: patience is short
    dataset = record_dataset(folder / "data", episodes=2, obs_type=obs_type)
    more = ["--steps=3", "--batch_size=2", "--env.type=place", f"--env.kwargs={{obs_type: {obs_type}}}"]
    more += ["--env_eval_freq=2", "--env.max_steps=4", "--eval.n_episodes=1"]
    patience = 30.0  # here it counts from the start, and ranks do not start together
    short, slow = (  # with many heartbeats in that time: a busy machine may hold up some of them
        functools.partial(trouble.hurry, functools.partial(trouble.lose_patience, 1, patience, *sleep))
        for sleep in ((), (LONG, patience + 1.0))
    )
    started = []
    for strategy in (DDP, FSDP):
        arguments = ["train", *runs.flags(dataset, folder / strategy[0] / "run", tiny_act, *strategy, *more)]
        started.append(ranks.Ranks(folder / strategy[0] / "out", 2, arguments, then={0: slow, 1: short}))
    return started


@pytest.fixture(scope="module", autouse=True)
def waiting(lowdim, tiny_act, tmp_path_factory) -> Iterator[dict[str, list[ranks.Ranks]]]:
    """Runs that mostly wait, beside all other tests of this file."""
    folder = tmp_path_factory.mktemp("waiting")
    hang = functools.partial(trouble.hang_while_reading, 6)
    freeze = trouble.before_step(6, trouble.send(signal.SIGSTOP))
    started: dict[str, list[ranks.Ranks]] = {}
    for name, event in (("hang", hang), ("freeze", freeze)):
        arguments = train(lowdim, folder / name / "run", tiny_act, PATIENCE)
        hurried = {0: trouble.hurry, 1: functools.partial(trouble.hurry, event)}
        started[name] = [ranks.Ranks(folder / name / "out", 2, arguments, then=hurried)]
    started["take long"] = start_taking_long(tiny_act, folder / "take_long")
    yield started
    for run in itertools.chain.from_iterable(started.values()):
        run.kill()


def ended(folder: Path, arguments: list[str], *codes: int, then: dict[int, Any] | None = None) -> list[str]:
    """Run two ranks to their ends, with these exit codes; what each of them said."""
    hurried = {rank: functools.partial(trouble.hurry, (then or {}).get(rank)) for rank in range(2)}
    started = ranks.Ranks(folder / "out", 2, arguments, then=hurried)
    assert started.end() == list(codes), started.errors()
    return [error for _, error in started.output]


# A loss that is no number


@pytest.mark.parametrize("strategy", [DDP, FSDP])
def test_nan_in_one_rank_ends_all_and_is_said_once(strategy, flags, tmp_path):
    spoil = functools.partial(trouble.spoil_batch, 6)
    output = ended(tmp_path, flags(*strategy), 1, 1, then={1: spoil})
    assert trouble.words(output, "The loss of step 7 is nan") == 1
    (bad,) = re.findall(rf"rank 1 on {HOST}: (\[.*?\])", output[0])
    part = ranks.computed(tmp_path / "out")[6][4:]
    assert bad == str([sample for sample, _ in part])
    assert "rank 0 on" not in output[0] and "Traceback" not in "".join(output)
    assert f"Last good checkpoint: {tmp_path}/run/checkpoints/000004" in output[0]
    assert trouble.saved_steps(tmp_path / "run") == [4]


# Ranks that die, hang, freeze or raise


def test_the_others_end_and_name_a_rank_that_was_killed(flags, tmp_path):
    die = trouble.before_step(6, trouble.send(signal.SIGKILL))
    output, _ = ended(tmp_path, flags(*FSDP), HUNG, KILLED, then={1: die})
    assert re.search(
        rf"rank 1 on {HOST} has sent no heartbeat for \d+ s: dead, frozen or cut off, last seen at step \d",
        output,
    )
    assert f"This is rank 0 on {HOST}, at step 6, computing" in output and "Traceback" not in output


def test_the_others_end_when_rank_0_was_killed(flags, tmp_path):
    die = trouble.before_step(6, trouble.send(signal.SIGKILL))
    _, output = ended(tmp_path, flags(), KILLED, HUNG, then={0: die})
    # whichever shows first: that the store is gone with rank 0, or that rank 0 is
    assert re.search(
        rf"hosted by rank 0 on {HOST} or its launcher, has not answered|rank 0 on {HOST} has ", output
    ), output


@pytest.mark.parametrize("strategy", [DDP, FSDP])
def test_the_stack_of_a_rank_that_raises_is_said_and_the_others_end(strategy, flags, tmp_path):
    output = ended(tmp_path, flags(*strategy), HUNG, HUNG, then={1: trouble.before_step(6, trouble.fail)})
    assert f"rank 1 on {HOST} failed" in output[1] and "in compute_step" not in output[0]
    assert "Traceback" in output[1] and "ValueError: a mistake of ours" in output[1]
    assert f"This is rank 1 on {HOST}, at step 6, computing" in output[1]
    assert f"rank 1 on {HOST} has ended at step 6, computing: ValueError: a mistake of ours" in output[0]
    assert "Traceback" not in output[0]


# While the run gets ready


def test_a_rank_that_dies_while_the_run_gets_ready_is_named(flags, tmp_path):
    die = functools.partial(trouble.at_call, "flexor.train.loop:build_state", 1, trouble.send(signal.SIGKILL))
    output, _ = ended(tmp_path, flags(), HUNG, KILLED, then={1: die})
    assert re.search(rf"rank 1 on {HOST} has sent no heartbeat .* last seen at step 0, getting ready", output)
    assert "Traceback" not in output


def test_a_mistake_that_all_ranks_notice_is_said_once(flags, tmp_path):
    output = ended(tmp_path, flags("--global_batch_size=3"), 2, 2, then=TOGETHER)
    assert trouble.words(output, "global_batch_size=3 can't be split evenly") == 1


# A full disk


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_no_room_for_the_shard_of_one_rank(asynchronous, flags, tmp_path):
    run, full = tmp_path / "run", functools.partial(trouble.fill_disk_at_shard, 8)
    arguments = flags(*FSDP, f"--checkpoint.async={asynchronous}")
    started = ranks.Ranks(tmp_path / "out", 2, arguments, then={1: full})
    codes, errors = started.end(), started.errors()
    # beside the loop, one may notice first, and the other one that it is gone
    assert codes == [1, 1] or (asynchronous == "true" and sorted(codes) == [1, HUNG]), errors
    assert "Can't save the checkpoint of step 8" in errors and "the disk is full" in errors
    assert f"The last good checkpoint is {run}/checkpoints/000004" in errors and "Traceback" not in errors
    # with asynchronous saving, each rank notices at a step of its own
    assert errors.count("Free some disk space") == 1 or asynchronous == "true"
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["000004", "last"]
    runs.assert_checkpoints_whole(run)


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_older_checkpoints_make_room_for_all_ranks(asynchronous, lowdim, tiny_act, tmp_path):
    """All ranks write again, whichever of them had no room."""
    with disks.small_disk(tmp_path / "disk", 30) as disk:
        run, wide = disk / "run", [*tiny_act, "--policy.dim_model=64", "--policy.dim_feedforward=256"]
        flags = runs.flags(lowdim, run, wide, *FSDP, "--steps=1", f"--checkpoint.async={asynchronous}")
        ranks.run(tmp_path / "first", 2, ["train", *flags])
        leave_free(disk, int(1.5 * runs.bytes_of(run / "checkpoints/000001")))
        again = ["resume", str(run), "--steps=5", "--save_freq=1", "--checkpoint.keep_last=2"]
        started = ranks.Ranks(tmp_path / "out", 2, again)
        assert started.end() == [0, 0], started.errors()
        assert "the disk is full: removed the checkpoints of steps" in started.errors()
        assert trouble.saved_steps(run) == [4, 5]
        runs.assert_checkpoints_whole(run)


# One folder, one run


def test_a_second_run_in_the_same_folder_is_refused_once(flags, tmp_path):
    run = tmp_path / "run"
    stay = trouble.before_step(2, functools.partial(time.sleep, FOREVER_S))
    first = ranks.Ranks(tmp_path / "first", 2, flags("--save_freq=0"), then={0: stay, 1: stay})
    try:
        first.all[0].wait_for(lambda: trouble.steps_done(run) >= 1)
        output = ended(tmp_path / "train", flags(), 2, 2, then=TOGETHER)
        assert trouble.words(output, f"output_dir={run} is not empty") == 1
        for again in (["resume", str(run)], [*flags(), "--resume=auto"]):
            output = ended(tmp_path / again[0] / "again", again, 2, 2, then=TOGETHER)
            assert trouble.words(output, f"in use by another process (pid {first.all[0].pid} on") == 1
            assert trouble.words(output, "Traceback") == 0
        assert [rank.poll() for rank in first.all] == [None, None]
    finally:
        first.kill()


# Runs that mostly wait: see `waiting`


def test_a_rank_that_hangs_while_reading_brings_the_run_down(waiting):
    (run,) = waiting["hang"]
    assert run.end() == [HUNG, HUNG], run.errors()
    output = [error for _, error in run.output]
    for text in output:
        assert re.search(rf"rank 1 on {HOST} has made no progress for \d+ s: step 6, reading data", text), (
            text
        )
    assert "Rank 0 waits for it" in output[1] and "trouble.py" in output[1] and "loader.py" in output[1]


def test_a_rank_that_is_frozen_is_named_by_the_other(waiting):
    (run,) = waiting["freeze"]
    _, output = run.all[0].end()
    run.kill()
    assert run.all[0].returncode == HUNG
    assert re.search(
        rf"rank 1 on {HOST} has sent no heartbeat for \d+ s: dead, frozen or cut off, last seen at step \d",
        output,
    )
    assert f"This is rank 0 on {HOST}, at step 6, computing" in output


@pytest.mark.slow
def test_nothing_trips_while_rank_0_takes_long(waiting):
    """Longer than ranks wait for each other in a step, and than is allowed without progress."""
    for run in waiting["take long"]:
        assert run.end() == [0, 0], run.errors()
        assert "no progress" not in run.errors() and "eval_success" in run.errors()
