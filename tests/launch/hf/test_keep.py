"""A run kept in a folder that outlives its machine: nothing half, nothing lost, nothing that was removed."""

import subprocess
import sys
from pathlib import Path

import pytest

from flexor.launch.hf import keep
from flexor.launch.hf.keep import RunKeeper, restore
from flexor.train.checkpoint import folder as checkpoint
from support.limits import LIMIT_S


@pytest.fixture
def run(tmp_path) -> Path:
    """A run as it lies on the disk, with one checkpoint."""
    folder = tmp_path / "run"
    save(folder, 1)
    (folder / "config.yaml").write_text("steps: 3")
    (folder / "metrics.jsonl").write_text("1\n")
    (folder / ".lock").write_text("pid 1")
    (folder / "videos").mkdir()
    (folder / "videos" / "a.mp4").write_bytes(b"film")
    return folder


@pytest.fixture
def backup(tmp_path) -> Path:
    """A mounted bucket is there before anything is in it; the run's folder is not."""
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket" / "run"


def save(run: Path, step: int) -> Path:
    run.mkdir(exist_ok=True)
    folder = checkpoint.Folder(run / "checkpoints", step, 100)
    folder.open()
    (folder.temporary / "pretrained_model").mkdir()
    (folder.temporary / "pretrained_model" / "model.safetensors").write_bytes(bytes(1000) + bytes([step]))
    (folder.temporary / "training_state" / "zz").write_text("after the manifest, by name")
    return folder.finish()


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def steps(folder: Path) -> list[int]:
    return list(checkpoint.complete(folder / "checkpoints"))


def test_what_is_kept_comes_back(run, backup, tmp_path):
    assert RunKeeper(tmp_path / "nothing", backup).copy() and not backup.exists()
    assert _fresh(run, backup).copy()
    restore(backup, tmp_path / "other")
    expected = files(run)
    del expected[".lock"]
    assert files(tmp_path / "other") == {k: v for k, v in expected.items() if "/last/" not in k}
    checkpoint.verify(tmp_path / "other" / "checkpoints" / "000001")


def _fresh(run: Path, backup: Path) -> RunKeeper:
    """A keeper that was there before the run began."""
    aside = run.with_name("aside")
    run.rename(aside)
    keeper = RunKeeper(run, backup)
    aside.rename(run)
    return keeper


def test_only_what_is_new_is_copied(run, backup):
    keeper = _fresh(run, backup)
    assert keeper.copy()
    before = {p: p.stat().st_mtime_ns for p in backup.rglob("*") if p.is_file()}
    save(run, 2)
    (run / "metrics.jsonl").write_text("1\n2\n")
    assert keeper.copy()
    assert steps(backup) == [1, 2] and (backup / "metrics.jsonl").read_text() == "1\n2\n"
    changed = [p.name for p, time in before.items() if p.stat().st_mtime_ns != time]
    assert changed == ["metrics.jsonl"]


def test_unfinished_checkpoints_stay_away(run, backup):
    unfinished = checkpoint.Folder(run / "checkpoints", 2, 100)
    unfinished.open()
    (run / "checkpoints" / "000003").mkdir()
    assert _fresh(run, backup).copy()
    assert [p.name for p in (backup / "checkpoints").iterdir()] == ["000001"]


def test_checkpoints_that_the_run_removed_go(run, backup):
    keeper = _fresh(run, backup)
    keeper.copy()
    save(run, 2)
    checkpoint.prune(run / "checkpoints", keep_last=1, keep_every=None)
    assert keeper.copy()
    assert steps(backup) == [2] and len(list((backup / "checkpoints").iterdir())) == 1


def test_the_next_machine_keeps_what_the_one_before_kept(run, backup, tmp_path):
    """Only the newest comes back, so that the others are not here does not mean that they were removed."""
    save(run, 2)
    assert _fresh(run, backup).copy()
    other = tmp_path / "other"
    restore(backup, other)
    keeper = RunKeeper(other, backup)
    assert steps(other) == [2]
    save(other, 3)
    assert keeper.copy()
    assert steps(backup) == [1, 2, 3]


def test_a_copy_that_fails_is_made_again(run, backup, log_lines):
    backup.mkdir()
    (backup / "checkpoints").write_text("in the way")
    keeper = _fresh(run, backup)
    assert not keeper.copy()
    assert (backup / "metrics.jsonl").exists()  # what can be copied is
    assert any("000001 could not be copied" in line for line in log_lines)
    (backup / "checkpoints").unlink()
    assert keeper.copy()
    checkpoint.verify(backup / "checkpoints" / "000001")


@pytest.mark.parametrize("copied", [1, 2])  # of three files
def test_a_machine_that_dies_while_copying(copied, run, backup, tmp_path, monkeypatch):
    """Whatever it had copied, what comes back is whole."""
    save(run, 2)
    keeper = _fresh(run, backup)
    keeper.copy()
    save(run, 3)
    copies, copy = iter(range(100)), keep._copy

    def die(source: Path, target: Path) -> None:
        if next(copies) == copied:
            raise SystemExit("power")
        copy(source, target)

    monkeypatch.setattr(keep, "_copy", die)
    with pytest.raises(SystemExit):
        keeper.copy()
    monkeypatch.setattr(keep, "_copy", copy)
    assert (backup / "checkpoints" / "000003").exists()
    restore(backup, tmp_path / "other")
    assert steps(tmp_path / "other") == [2] and steps(backup) == [1, 2]
    assert not (backup / "checkpoints" / "000003").exists()


def test_a_damaged_checkpoint_is_passed_over(run, backup, tmp_path, log_lines):
    """Mounted folders may lose what was written last."""
    save(run, 2)
    assert _fresh(run, backup).copy()
    (backup / "checkpoints" / "000002" / "pretrained_model" / "model.safetensors").write_bytes(b"half")
    other = tmp_path / "other"
    restore(backup, other)
    assert steps(other) == [1]
    assert any("000002" in line for line in log_lines)
    keeper = RunKeeper(other, backup)
    save(other, 2)  # the run gets there again
    assert keeper.copy()
    checkpoint.verify(backup / "checkpoints" / "000002")


def test_training_is_told_to_stop_in_time(backup, tmp_path):
    """At once, here: before the program can do anything about it."""
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "flexor.launch.hf.keep",
            "--seconds=0",
            str(backup),
            str(tmp_path / "r"),
            "--",
            "doctor",
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 128 + 15 and "telling training to save and stop" in ended.stderr


def test_links_are_not_followed(run, backup, tmp_path, log_lines):
    secret = tmp_path / "id_rsa"
    secret.write_text("mine alone")
    for link in (run / "notes", run / "videos" / "b.mp4", run / "checkpoints/000001/training_state/more"):
        link.symlink_to(secret)
    assert _fresh(run, backup).copy()
    assert b"mine alone" not in files(backup).values() and (backup / "config.yaml").is_file()
    assert sum("is a symbolic link, so it is not copied" in line for line in log_lines) == 3
