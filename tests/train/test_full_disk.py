"""Out of disk: the last checkpoint is whole, no line of metrics is lost, and the run goes on exactly."""

import functools
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexor.cli.main import main
from flexor.train.checkpoint import folder as checkpoint
from support import disks, runs
from support.disks import leave_free

STEPS = 10
EVERY_STEP = [f"--steps={STEPS}", "--save_freq=1"]


@pytest.fixture(scope="module")
def uninterrupted(lowdim, tiny_act, tmp_path_factory) -> Path:
    """The run that nothing happened to."""
    return runs.train(lowdim, tmp_path_factory.mktemp("whole") / "run", tiny_act, *EVERY_STEP)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    with disks.small_disk(tmp_path / "disk", 10) as disk:
        yield disk


def test_full_disk(small_disk, lowdim, tiny_act, capsys, tmp_path):
    run = small_disk / "run"
    wide = ["--policy.dim_model=64", "--policy.dim_feedforward=256"]
    flags = runs.flags(lowdim, run, [*tiny_act, *wide], "--steps=12", "--save_freq=1")
    assert main(["train", *flags]) == 1
    error = capsys.readouterr().err
    saved = checkpoint.complete(run / "checkpoints")
    assert saved and "the disk is full" in error and f"step {max(saved) + 1}" in error
    assert str(saved[max(saved)]) in error and "flexor resume" in error and "--checkpoint.keep_last" in error
    assert [p.name for p in (run / "checkpoints").iterdir() if p.name.startswith(".")] == []
    runs.assert_checkpoints_whole(run)
    # checkpoints that would be removed after the next save make room for it
    assert main(["resume", str(run), "--checkpoint.keep_last=1", "--steps=12"]) == 0
    assert [*checkpoint.complete(run / "checkpoints")] == [12]

    again = runs.train(lowdim, tmp_path / "again", [*tiny_act, *wide], "--steps=12")
    runs.assert_same(again, run, 12)


def test_no_room_for_a_line_of_metrics(small_disk, lowdim, tiny_act, capsys):
    """A disk can also be full before anything is saved."""
    run = small_disk / "run"
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    assert main(["train", *runs.flags(lowdim, run, tiny_act, "--steps=12")]) == 1
    error = capsys.readouterr().err
    assert "No space left" in error or "disk is full" in error


WIDE = ["--policy.dim_model=64", "--policy.dim_feedforward=256"]  # checkpoints of about a megabyte


def test_older_checkpoints_make_room(small_disk, lowdim, tiny_act, tmp_path, log_lines):
    """Room for so many that those to keep fit, but not one more, as there is after a save and before the clean-up."""
    run, again = small_disk / "run", tmp_path / "again"
    policy = [*tiny_act, *WIDE]
    flags = ["--steps=9", "--save_freq=1", "--checkpoint.keep_every=4"]
    runs.train(lowdim, again, policy, *flags)
    size = runs.bytes_of(again / "checkpoints" / "000001")
    leave_free(small_disk, int(3.5 * size))
    runs.train(lowdim, run, policy, *flags, "--checkpoint.keep_last=2")
    assert [*checkpoint.complete(run / "checkpoints")] == [4, 8, 9]
    assert any("the disk is full: removed the checkpoints of steps" in line for line in log_lines)
    runs.assert_checkpoints_whole(run)
    runs.assert_same(again, run, 9)


def test_the_newest_checkpoint_never_makes_room(small_disk, lowdim, tiny_act, capsys):
    """Not even with keep_last=1: the new one may fail again."""
    run = small_disk / "run"
    assert main(["train", *runs.flags(lowdim, run, [*tiny_act, *WIDE], "--steps=1")]) == 0
    leave_free(small_disk, runs.bytes_of(run / "checkpoints" / "000001") // 2)
    assert main(["resume", str(run), "--checkpoint.keep_last=1", "--steps=2"]) == 1
    assert "the disk is full" in capsys.readouterr().err
    assert [*checkpoint.complete(run / "checkpoints")] == [1]
    runs.assert_checkpoints_whole(run)


def test_full_disk_costs_no_line_of_metrics(small_disk, lowdim, tiny_act, tmp_path, log_lines, monkeypatch):
    """Training goes on; the lines are written once there is room, and none is cut off."""
    from flexor.train.run_log import RunLog

    run, log_steps = small_disk / "run", RunLog.log_steps

    def full_for_a_while(self, batches):
        if self.state.step == 3:
            leave_free(small_disk, 0)
        if self.state.step == 7:
            lines = (run / "metrics.jsonl").read_text()
            assert lines.endswith("\n") and len(lines.splitlines()) < 6
            (small_disk / "filler").unlink()
        log_steps(self, batches)

    monkeypatch.setattr(RunLog, "log_steps", full_for_a_while)
    runs.train(lowdim, run, tiny_act, "--steps=9")
    monkeypatch.setattr(RunLog, "log_steps", log_steps)
    again = runs.train(lowdim, tmp_path / "again", tiny_act, "--steps=9")
    assert sum("can't write to" in line and "metrics.jsonl" in line for line in log_lines) == 1
    runs.assert_same(again, run, 9)


def test_a_run_begins_to_resume_on_a_full_disk(small_disk, lowdim, tiny_act, tmp_path, capsys):
    """It may have checkpoints to remove. What only tells about the run is not worth its end."""
    uninterrupted = runs.train(lowdim, tmp_path / "whole", tiny_act, "--steps=4", "--save_freq=2")
    run = runs.cut_back(uninterrupted, small_disk / "run", 2)
    leave_free(small_disk, 0)
    assert main(["resume", str(run)]) == 1
    assert "Can't save the checkpoint of step 4" in capsys.readouterr().err
    (small_disk / "filler").unlink()
    assert main(["resume", str(run)]) == 0
    runs.assert_same(uninterrupted, run, 4)


@pytest.mark.ranks
def test_file_size_limit(lowdim, tiny_act, tmp_path):
    """Where disks can't be mounted: the same, with a limit on a file's size."""
    run = tmp_path / "run"
    flags = runs.flags(lowdim, run, tiny_act, "--steps=4", "--save_freq=2")
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (60_000, 60_000))
    process = runs.Forked(tmp_path / "out", "train", *flags, before=limit)
    _, error = process.end()
    assert process.returncode == 1, error
    assert "Can't save the checkpoint of step 2" in error and "Traceback" not in error
    assert list((run / "checkpoints").iterdir()) == []
