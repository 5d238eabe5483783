"""What the machine has for this process, and what the trainer tells torch's allocator."""

import os
import sys
from types import SimpleNamespace

import psutil
import pytest

from flexor.core import cgroups, machine
from flexor.core.machine import let_gpu_memory_grow


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only there")
def test_gpu_memory_grows_unless_the_user_has_said_something(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    let_gpu_memory_grow()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    let_gpu_memory_grow()
    assert "PYTORCH_ALLOC_CONF" not in os.environ


def group_files(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(f"{text}\n")


def test_the_limits_of_a_job_count(tmp_path, monkeypatch):
    """SLURM and systemd set them in a group far below the root."""
    group_files(tmp_path / "job/step", memory_max=8 << 30, memory_current=3 << 30, cpu_max="150000 100000")
    (tmp_path / "job/step/memory.stat").write_text(f"active_file {1 << 30}\n")  # can be dropped
    group_files(tmp_path / "job", memory_max="max", memory_current=3 << 30, cpu_max="max 100000")
    monkeypatch.setattr(cgroups, "_folders", lambda controller: [tmp_path / "job/step", tmp_path / "job"])
    monkeypatch.setattr(machine, "total_memory", lambda: 64 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=48 << 30))
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert machine.free_memory() == 6 << 30
    assert machine.usable_cores() == 2
    monkeypatch.setattr(cgroups, "_folders", lambda controller: [tmp_path / "job"])
    assert machine.free_memory() == 48 << 30 and machine.usable_cores() == 16
