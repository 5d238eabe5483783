"""Runs with mutated files, and everything that `flexor` does with a run or checkpoint that somebody else has made."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from flexor.cli.main import main
from flexor.core.manifest import hash_file
from flexor.policies.pretrained import load_pretrained
from flexor.train.checkpoint.export import export
from support.mutations import mutated, mutated_bytes, mutated_text


def copied(base: Path, target: Path) -> None:
    """Links stay links."""
    shutil.copytree(base, target, symlinks=True)


def mutate(run: Path, rng: np.random.Generator, canary: Path) -> str:
    """Change one file; gives its name. Mostly as somebody would who wants it to be loaded: with a new manifest."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and not path.is_symlink()]
    files = [path for path in files if path.name not in (".lock", "train.log") and path.stat().st_size]
    path = files[rng.integers(len(files))]
    if path.suffix == ".yaml":
        settings = yaml.safe_load(path.read_text())
        path.write_text(yaml.safe_dump(mutated(settings, rng, canary), allow_unicode=False))
    elif path.suffix in (".json", ".jsonl"):
        path.write_bytes(mutated_text(path.read_text(), rng, canary))
    elif path.suffix == ".safetensors" and rng.random() < 0.7:
        path.write_bytes(mutated_header(path.read_bytes(), rng, canary))
    else:
        path.write_bytes(mutated_bytes(path.read_bytes(), rng))
    if rng.random() < 0.8:
        for manifest in run.glob("checkpoints/*/training_state/manifest.json"):
            if not manifest.parents[1].is_symlink() and manifest != path:
                settle(manifest)
    return path.relative_to(run).as_posix()


def mutated_header(data: bytes, rng: np.random.Generator, canary: Path) -> bytes:
    """A safetensors file whose header says something else."""
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(mutated(json.loads(data[8 : 8 + size]), rng, canary)).encode("utf-8", "replace")
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def settle(manifest: Path) -> None:
    """Make the manifest that of the files as they are now."""
    listed = json.loads(manifest.read_text())
    for name, entry in listed["files"].items():
        path = manifest.parents[1] / name
        if path.is_file():
            entry |= {"size": path.stat().st_size, "sha256": hash_file(path)}
    manifest.write_text(json.dumps(listed))


def load(run: Path) -> None:
    pretrained = load_pretrained(str(run))
    config = pretrained.policy.config
    steps = (1,) if config.observation_deltas is None else (1, config.n_obs_steps)
    observation = {
        name: np.zeros((*steps, *feature.shape), np.uint8 if name in config.images else np.float32)
        for name, feature in config.observed.items()
    }
    pretrained.chunk(observation, ["do"])


def flexor(*words: str) -> None:
    """The program itself: it prints a message and an exit code, or raises what it should not."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(list(words))


def resume(run: Path) -> None:
    """One step more, so that everything that a checkpoint holds is used."""
    flexor(
        "resume",
        str(run),
        "--steps=5",
        "--save_checkpoint=false",
        "--wandb.enable=false",
        "--policy.device=cpu",
    )


def start_from(run: Path) -> None:
    words = [
        "train",
        f"--policy.path={run}",
        f"--dataset.root={os.environ['FUZZED_DATA']}",
        "--policy.device=cpu",
    ]
    flexor(
        *words,
        "--steps=1",
        "--batch_size=2",
        f"--output_dir={run.with_name('new')}",
        "--policy.push_to_hub=false",
    )


def show(run: Path) -> None:
    flexor("watch", str(run), "--once")
    flexor("report", str(run), "--output", str(run.with_name("report.html")))
    flexor("diagnose", str(run))


ACTIONS: dict[str, Callable[[Path], Any]] = {
    "load": load,
    "resume": resume,
    "export": lambda run: export(run, run.with_name("exported")),
    "start from": start_from,
    "show": show,
}
