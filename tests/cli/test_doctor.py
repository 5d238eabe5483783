"""What `flexor doctor` says of a machine, and what it says is wrong with one."""

import json
import os
import sys

import pytest

from flexor.cli import doctor
from flexor.cli.main import main


@pytest.fixture
def healthy(monkeypatch):
    """A machine with enough of everything, whatever this one has."""
    monkeypatch.setattr(doctor, "LITTLE_DISK_GB", 0)
    monkeypatch.setattr(doctor, "LITTLE_MEMORY_GB", 0)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)


def problems() -> str:
    return json.dumps(doctor.examine()["problems"])


def test_text(healthy, capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in ("flexor", "Python", "torch", "GPUs", "memory", "disk free", "video", "no problems found"):
        assert word in text


def test_json(healthy, capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == [] and report["packages"]["torch"] and report["torch"]["version"]
    assert report["decoders"]["h264"] is True


def test_a_problem_has_a_fix_and_an_exit_code(healthy, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "LITTLE_DISK_GB", 10**9)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "PROBLEM" in text and "fix: free some disk space" in text and "no problems found" not in text


def test_little_memory(healthy, monkeypatch):
    monkeypatch.setattr(doctor, "LITTLE_MEMORY_GB", 10**9)
    assert "--batch_size" in problems()


def test_driver_without_a_gpu(healthy, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "torch sees no GPU" in problems()


def test_unsupported_python(healthy, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 1, "final", 0))
    assert "3.11 to 3.13" in problems()


def test_without_a_video_library(healthy, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    assert "pip install --force-reinstall av" in problems()
    assert "FFmpeg none: none" in doctor.render(doctor.examine())


def test_folder_that_cannot_be_written(healthy, monkeypatch):
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert "FLEXOR_CACHE" in problems()


def test_cache_that_is_not_there_yet(healthy, monkeypatch, tmp_path):
    monkeypatch.setenv("FLEXOR_CACHE", str(tmp_path / "a" / "b"))
    assert doctor.examine()["disk"]["cache"] > 0 and problems() == "[]"


def test_where_there_is_no_affinity(healthy, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # macOS
    assert "cores" in doctor.examine()["processor"]
