"""Checkpoints that are written beside the loop: complete, also after an error; in the loop if memory is short."""

import errno
import os
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from safetensors import SafetensorError

from flexor.cli.main import main
from flexor.data.dataset import Dataset
from flexor.data.loader import loader
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.checkpoint import saver
from flexor.train.checkpoint.saver import Saver
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

    monkeypatch.setattr(loader, "GROUP_SAMPLES", 1)  # steps are read one by one
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


def disk_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (disk_error(errno.ENOSPC), "Free some disk space"),
        (disk_error(errno.EDQUOT), "Free some disk space"),
        (OSError("rank 1: OSError(28, 'No space left on device')"), "Free some disk space"),
        (OSError("I/O error: Disk quota exceeded (os error 122)"), "Free some disk space"),
        (disk_error(errno.EIO), "Check the disk"),
        (OSError("rank 0: OSError(5, 'Input/output error'); rank 1: OSError(5, '...')"), "Check the disk"),
        (disk_error(errno.EACCES), "Make it writable for the user"),
        (SafetensorError("I/O error: Read-only file system (os error 30)"), "Mount it writable"),
        (disk_error(errno.ESTALE), "Check the network and the mount"),
        (disk_error(errno.EFBIG), "ulimit -f"),
        (disk_error(errno.EMFILE), "ulimit -n"),
        (
            FileNotFoundError(errno.ENOENT, "No such file", "part.safetensors"),
            "Fix that",
        ),  # the folder is there
    ],
)
def test_what_is_advised_is_what_helps(error, advice, tmp_path: Path):
    failure = str(checkpoint.Folder(tmp_path, 7, 10).failure(error))
    assert "step 7" in failure and advice in failure
    full = advice == "Free some disk space"
    # there is no checkpoint yet: a run that filled the disk can't be resumed
    assert ("and start the run again" if full else "and continue with `flexor resume`") in failure
    assert ("Free some disk space" in failure) == full and (full or str(error) in failure)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """The folder in a file system that is read-only."""
    for options in (["--bind", str(folder)], ["-o", "remount,bind,ro"]):
        if subprocess.run(["mount", *options, str(folder)], capture_output=True, check=False).returncode:
            pytest.skip("mounting a folder read-only is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def not_permitted(folder: Path) -> Iterator[None]:
    """The folder for reading only, by a user who may not do everything."""
    root, mode = os.geteuid() == 0, folder.stat().st_mode
    for above in folder.parents if root else ():
        if not above.stat().st_mode & stat.S_IXOTH:
            above.chmod(above.stat().st_mode | stat.S_IXGRP | stat.S_IXOTH)
    folder.chmod(0o555)
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(mode)


@contextmanager
def moved(folder: Path) -> Iterator[None]:
    folder.parent.rename(folder.parent.with_name("elsewhere"))
    yield


@pytest.mark.parametrize(
    ("state", "cause", "fix"),
    [
        (read_only, "the file system is read-only", "Mount it writable"),
        (not_permitted, "permission denied", "Make it writable for the user of the run"),
        (moved, "the folder is gone", "Put it back"),
    ],
)
def test_a_run_that_cant_save_says_why(state, cause, fix, lowdim, tiny_act, tmp_path, capsys, monkeypatch):
    """After its first checkpoint, something happens to the folder."""
    save, run = Saver.save, tmp_path / "run"

    def then(self):
        self.wait()
        with state(run / "checkpoints") if self.state.step == 4 else nullcontext():
            save(self)
            self.wait()

    monkeypatch.setattr(Saver, "save", then)
    assert main(["train", *runs.flags(lowdim, run, tiny_act, "--steps=6", "--save_freq=2")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "Can't save the checkpoint of step 4" in error and cause in error and f"{fix} " in error
    assert "Free some disk space" not in error and "and continue with `flexor resume`" in error
    elsewhere = tmp_path / "elsewhere"
    if elsewhere.exists():
        assert not run.exists()
        elsewhere.rename(run)
    assert [*checkpoint.complete(run / "checkpoints")] == [2]
    monkeypatch.setattr(Saver, "save", save)
    assert main(["resume", str(run)]) == 0
    runs.assert_checkpoints_whole(run)
