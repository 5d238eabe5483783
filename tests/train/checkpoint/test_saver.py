"""Checkpoints that are written beside the loop: complete, also after an error; in the loop if memory is short."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from flexor.cli.main import main
from flexor.core.errors import CheckpointError
from flexor.data.dataset import Dataset
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.checkpoint import saver
from support import runs


def test_beside_the_loop_by_default(lowdim, tiny_act, tmp_path, log_lines):
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=4", "--save_freq=2", "--ema.enable")
    inside = ["--checkpoint.async=false", "--ema.enable"]
    other = runs.train(lowdim, tmp_path / "other", tiny_act, "--steps=4", "--save_freq=2", *inside)
    assert not any("training waits" in line for line in log_lines)
    assert sum("(the loop waited for" in line for line in log_lines) == 4
    for folder in (run, other):
        runs.assert_checkpoints_whole(folder)
    runs.assert_same(run, other, 4)


def test_in_the_loop_if_there_is_no_memory_for_a_copy(lowdim, tiny_act, tmp_path, log_lines, monkeypatch):
    monkeypatch.setattr(saver, "free_memory", lambda: 1000)
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=4", "--save_freq=2")
    assert sorted(checkpoint.complete(run / "checkpoints")) == [2, 4]
    runs.assert_checkpoints_whole(run)
    assert sum("training waits while checkpoints are written" in line for line in log_lines) == 1


def test_an_error_elsewhere_does_not_cost_the_checkpoint(lowdim, tiny_act, tmp_path, monkeypatch):
    reads, read, finish = [], Dataset.read, checkpoint.Folder.finish

    def fails_at_last(self, *more):
        reads.append(1)
        if len(reads) > 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(self, *more)

    def slowly(self, *more):
        time.sleep(0.5)  # the loop fails meanwhile
        finish(self, *more)

    monkeypatch.setattr(Dataset, "read", fails_at_last)
    monkeypatch.setattr(checkpoint.Folder, "finish", slowly)
    with pytest.raises(OSError):
        main(["train", *runs.flags(lowdim, tmp_path / "run", tiny_act, "--steps=4", "--save_freq=2")])
    assert sorted(checkpoint.complete(tmp_path / "run" / "checkpoints")) == [2]
    runs.assert_checkpoints_whole(tmp_path / "run")


def test_no_thread_outlives_the_run(lowdim, tiny_act, tmp_path, monkeypatch):
    """A run that is done at once ends while memory for copies is still being taken."""
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=2")
    free = saver.free_memory

    def slowly() -> int:
        time.sleep(0.5)
        return free()

    monkeypatch.setattr(saver, "free_memory", slowly)
    assert main(["resume", str(run)]) == 0
    assert "room" not in [thread.name for thread in threading.enumerate()]


ADVICE = "Free some disk space"


@pytest.mark.parametrize(
    ("error", "advised"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), True),
        (OSError("rank 1: OSError(28, 'No space left on device')"), True),
        (OSError("I/O error: Disk quota exceeded (os error 122)"), True),
        (OSError(errno.EIO, os.strerror(errno.EIO)), False),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES)), False),
    ],
)
def test_only_a_full_disk_is_to_be_freed(error, advised, tmp_path: Path):
    failure = checkpoint.Folder(tmp_path, 7, 10).failure(error)
    assert isinstance(failure, CheckpointError) and "step 7" in str(failure)
    assert (ADVICE in str(failure)) == advised and "flexor resume" in str(failure)
    assert advised or str(error) in str(failure)
