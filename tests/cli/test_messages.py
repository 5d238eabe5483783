"""What people read where they made a mistake, and at the beginning and the end of a run."""

import shutil
from pathlib import Path

import pytest

from flexor.cli.main import main
from support import runs


@pytest.mark.parametrize(
    ("command", "says", "says_not"),
    [
        (["record", "x", "--episods=3"], "Unknown option --episods. Did you mean --episodes?", "--server"),
        (["eval", "runs/nope"], "runs/nope: there is no such folder; runs has first.", "download"),
        (["resume", "runs/nope"], "runs/nope: there is no such folder; runs has first.", "config.yaml"),
        (["train", "--polcy.type=act"], "Did you mean policy.type?", "dataset"),
        (["help", "trian"], "Did you mean train?", "Available"),
        (["train", "--dataset.image_transforms.tfs={hue: {weigth: 2}}"], "tfs.hue.weight?", "kwargs"),
        (["plan", "--policy.type=act", "--gpu=RTX 4090", "--price=-1"], "must be above 0", "USD"),
    ],
)
def test_mistakes_are_named(
    command: list[str],
    says: str,
    says_not: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(command) in (1, 2)
    error = capsys.readouterr().err
    assert says in error and says_not not in error


def test_a_run_says_what_it_trains_and_what_comes_next(
    lowdim: Path,
    tiny_act: list[str],
    tmp_path: Path,
    log_lines: list[str],
    capsys: pytest.CaptureFixture[str],
):
    """Nothing of decoding and lanes before it, and no setting without an effect is silent."""
    unused = ("--env.type=place", "--dataset.image_transforms.tfs.hue.weight=2")
    run = runs.train(lowdim, tmp_path / "a run", tiny_act, "--steps=1", *unused)
    lines = [line for line in log_lines if "statistics" not in line]
    assert lines[0].startswith("act: ") and "episodes" in lines[1]
    assert any("image_transforms is set, but images are not augmented" in line for line in lines)
    assert any("env.type=place has no effect in a run of 1 steps" in line for line in lines)
    assert not any("decode unit" in line for line in lines)
    last = capsys.readouterr().out.splitlines()
    commands = [line.split("  ")[1] for line in last[-3:]]
    assert commands == [f"flexor ui {tmp_path}", f"flexor eval '{run}' --open_loop", f"flexor serve '{run}'"]


def test_a_run_that_is_finished_or_has_no_checkpoint_is_not_said_to_go_on(
    lowdim: Path,
    tiny_act: list[str],
    tmp_path: Path,
    log_lines: list[str],
    capsys: pytest.CaptureFixture[str],
):
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=1")
    assert main(["resume", str(run)]) == 0
    assert "this run is finished, at step 1; --steps=N trains longer" in log_lines
    assert not any(line.startswith("steps 1 to 1") for line in log_lines)
    shutil.rmtree(run / "checkpoints")
    assert main(["resume", str(run)]) == 1
    error = capsys.readouterr().err
    assert "has no complete checkpoint to resume from. Start again in another folder" in error
