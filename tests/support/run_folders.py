"""Folders as runs write them, without a training: for those who only read them."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import yaml


def report(step: int, **more: Any) -> dict[str, Any]:
    """A line of metrics, as the loop writes it."""
    values = {"loss": 2.0 * math.exp(-step / 500) + 0.1, "l1_loss": 0.1, "grad_norm": 10.0 + step % 7}
    rates = {"samples_per_s": 400.0, "data_wait": 0.05, "gpu_busy": 0.93}
    return {"step": step, **values, **rates, "lr": 1e-4, "epoch": step / 100, **more}


def add_lines(file: Path, *lines: dict[str, Any]) -> None:
    with file.open("a") as out:
        out.write("".join(json.dumps(line) + "\n" for line in lines))


def write_run(
    folder: Path,
    last: int = 1000,
    steps: int = 2000,
    *,
    every: int = 100,
    pid: int | None = None,
    settings: dict[str, Any] | None = None,
    record: dict[str, Any] | None = None,
) -> Path:
    """A run that has reported up to step `last`. `pid`: of the process that trains (default: one that has ended)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "job_name": "act",
        "steps": steps,
        "global_batch_size": 4,
        "log_freq": every,
        "policy": {"type": "act", "device": "cuda"},
        "optimizer": {"type": "adamw", "lr": 1e-4},
    } | (settings or {})
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    machine = {"device": "NVIDIA H200", "processes": 1, "precision": "bf16", "torch": "2.11"}
    data = {"name": "place", "episodes": 4, "frames": 137, "tasks": ["push"]}
    content = {"id": "0", "dataset": data, "machine": machine, "plan": {}} | (record or {})
    (folder / "run.json").write_text(json.dumps(content))
    (folder / ".lock").write_text(f"pid {pid or ended_pid()} on {os.uname().nodename}")
    add_lines(folder / "metrics.jsonl", *(report(step) for step in range(every, last + 1, every)))
    return folder


def ended_pid() -> int:
    """The number of a process that is no more."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def add_checkpoint(run: Path, step: int, complete: bool = True) -> Path:
    state = run / "checkpoints" / f"{step:06d}" / "training_state"
    state.mkdir(parents=True)
    (state / "optimizer.safetensors").write_bytes(b"0" * 1000)
    if complete:
        files = {"training_state/optimizer.safetensors": {"size": 1000, "sha256": ""}}
        (state / "manifest.json").write_text(json.dumps({"format": 1, "step": step, "files": files}))
    return state.parent
