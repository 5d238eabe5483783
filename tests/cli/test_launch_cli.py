"""The verb `launch local`, --gpus and --processes, and the script that uses them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from flexor.cli.main import main

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_multi_gpu.sh"


@pytest.fixture
def no_gpu(monkeypatch):
    """Whatever there is: torch counts GPUs once, so that hiding them from it may come too late."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)


@pytest.fixture
def four_gpus(monkeypatch):
    """All that the launcher asks of GPUs is how many there are."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that it is as before after the test
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def printed_commands(capsys, *arguments: str) -> list[str]:
    assert main(["launch", "local", "--dry-run", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    "arguments, command",
    [
        (["--gpus=2", "--config", "x.yaml"], "train --config x.yaml"),
        (["--config", "x.yaml", "--gpus", "2", "seed=-1"], "train --config x.yaml seed=-1"),
        (["--gpus=2", "--", "resume", "runs/a b"], "resume 'runs/a b'"),
        (["train", "--gpus=2", "--steps", "5"], "train --steps 5"),
        (["--processes=2"], "train"),
    ],
)
def test_dry_run_shows_what_would_be_started(arguments, command, four_gpus, capsys):
    lines = printed_commands(capsys, *arguments)
    assert [re.search(r"\bRANK=(\d)", line)[1] for line in lines] == ["0", "1"]
    assert all(line.endswith(f" -m flexor {command}") for line in lines)
    assert all(("CUDA_VISIBLE_DEVICES=''" in line) == ("--processes=2" in arguments) for line in lines)


def test_all_visible_gpus_unless_told_otherwise(four_gpus, capsys):
    assert len(printed_commands(capsys)) == len(printed_commands(capsys, "--gpus=all")) == 4
    assert "RANK" not in printed_commands(capsys, "--gpus=1")[0]  # one process needs no launcher
    assert "RANK=0" in printed_commands(capsys, "--gpus=1", "--max-restarts=1")[0]  # but to start it again


@pytest.mark.parametrize("verb", [["train"], ["launch", "local"], ["resume", "run"]])
def test_more_gpus_than_there_are(verb, four_gpus, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert main([*verb, "--gpus=5"]) == 2
    assert (
        "--gpus=5: the number of visible GPUs is 4 (CUDA_VISIBLE_DEVICES=0,1,2,3)" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "arguments", [["train", "--gpus=all"], ["launch", "local"], ["resume", "run", "--gpus=2"]]
)
def test_no_gpu_at_all(arguments, no_gpu, capsys):
    assert main(arguments) == 2
    assert re.search("sees no GPU .*--processes=N", capsys.readouterr().err)


@pytest.mark.parametrize("flag", ["--gpus=0", "--gpus=some", "--processes=-1", "--max-restarts=x"])
def test_numbers_that_can_not_be(flag, four_gpus, capsys):
    assert main(["launch", "local", flag]) == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}])
@pytest.mark.parametrize("flag", ["--gpus=2", "--processes=2", "--processes=1"])
def test_a_launched_process_launches_nothing(variables, flag, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["train", flag]) == 2
    assert re.search("started this process as rank 1 .*Leave", capsys.readouterr().err)


@pytest.mark.parametrize("arguments", [["local", "evla"], ["lokal"], ["local", "--", "demo"]])
def test_what_can_not_be_launched(arguments, four_gpus, capsys):
    assert main(["launch", *arguments]) == 2
    assert "Can't launch" in capsys.readouterr().err


def test_one_process_is_this_one(no_gpu, capsys):
    for launcher in ([], ["launch", "local"]):
        assert main([*launcher, "resume", "nowhere", "--processes=1"]) == 1
        assert ": nowhere: there is no such folder" in capsys.readouterr().err


@pytest.mark.ranks
def test_a_mistake_in_the_settings_is_said_and_not_repeated_by_restarts(warm_python, tmp_path):
    """A launcher and two processes of Flexor."""
    arguments = ["launch", "local", "--processes=2", "--max-restarts=1", "resume", str(tmp_path / "nowhere")]
    result = subprocess.run([warm_python, "-m", "flexor", *arguments], capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    assert "nowhere" in result.stderr and re.search(r"rank \d \(pid \d+\) ended with code 1", result.stderr)
    assert "restart" not in result.stderr


# scripts/train_multi_gpu.sh


ECHO = '#!/bin/sh\necho "$@ on $CUDA_VISIBLE_DEVICES"\nexit 75\n'


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def script(path: Path, *arguments: str, file: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    """The script, where only the programs in the folder `path` are found."""
    environment = {"PATH": f"{path}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "0,2"}
    return subprocess.run(
        [file, *arguments], capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_script_trains_on_all_visible_gpus(tmp_path):
    program(tmp_path / "flexor", ECHO)
    result = script(tmp_path, "--config", "run.yaml", "--steps=5")
    assert (result.returncode, result.stdout) == (75, "train --config run.yaml --steps=5 --gpus=all on 0,2\n")


def test_script_finds_the_project_environment(tmp_path):
    copy = Path(shutil.copy(SCRIPT, program(tmp_path / "scripts" / "train.sh", "")))
    missing = script(tmp_path, "--config=run.yaml", file=copy)
    assert missing.returncode == 2 and "make setup" in missing.stderr
    program(tmp_path / ".venv" / "bin" / "flexor", ECHO)
    assert (
        script(tmp_path, "--config=run.yaml", file=copy).stdout
        == "train --config=run.yaml --gpus=all on 0,2\n"
    )


def test_script_says_what_it_is(tmp_path):
    assert script(tmp_path, "--config", "x", "--help").stdout.startswith("usage: scripts/train_multi_gpu.sh")
    empty = script(tmp_path)
    assert empty.returncode == 2 and empty.stderr.startswith("usage:")


@pytest.mark.ranks
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_script_refuses_without_a_gpu(warm_python, tmp_path):
    program(tmp_path / "flexor", f'#!/bin/sh\nexec {warm_python} -m flexor "$@"\n')
    result = script(tmp_path, "--config", "run.yaml")
    assert result.returncode == 2 and "sees no GPU" in result.stderr
