"""Datasets with mutated metadata, and everything that `flexor data` does with a dataset before it trains on it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flexor.data.check import info
from flexor.data.check.check import check_dataset
from flexor.data.dataset import open_dataset
from flexor.data.repair.repair import repair_dataset
from support.mutations import mutated_table, mutated_text


def linked(base: Path, target: Path) -> None:
    """A copy whose files are hard links, but for the metadata, which is changed."""
    for path in base.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(base)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place) if "meta" in place.parts else os.link(path, place)


def mutate(root: Path, rng: np.random.Generator, canary: Path) -> str:
    """Change a file of the metadata; gives its name."""
    files = sorted(path for path in (root / "meta").rglob("*") if path.is_file())
    weights = np.array([4.0 if path.name == "info.json" else 1.0 for path in files])
    path = files[rng.choice(len(files), p=weights / weights.sum())]
    if path.suffix == ".parquet":
        mutated_table(path, rng, canary)
    else:
        path.write_bytes(mutated_text(path.read_text(), rng, canary))
    return path.relative_to(root).as_posix()


def read(root: Path) -> None:
    dataset = open_dataset(root=root, on_bad_episode="skip")
    dataset.fingerprint()
    if len(dataset):
        dataset.read([0, len(dataset) - 1])


def describe(root: Path) -> None:
    info.render(info.describe(root))


def check(root: Path) -> None:
    str(check_dataset(root, deep=False))


def repair(root: Path) -> None:
    out = root.with_name("repaired")
    try:
        str(repair_dataset(root, out, decode=False))
    finally:
        shutil.rmtree(out, ignore_errors=True)


def stream(root: Path) -> None:
    """As from a web server or bucket: files are copied to the cache."""
    import fsspec

    memory: Any = fsspec.filesystem("memory")
    memory.store.clear()
    for path in root.rglob("*"):
        if path.is_file():
            memory.pipe_file(f"/data/{path.relative_to(root).as_posix()}", path.read_bytes())
    dataset = open_dataset(root="memory://data", on_bad_episode="skip")
    if len(dataset):
        try:
            dataset.read([0])
        finally:
            shutil.rmtree(dataset.root, ignore_errors=True)


ACTIONS: dict[str, Callable[[Path], None]] = {
    "read": read,
    "info": describe,
    "check": check,
    "repair": repair,
    "stream": stream,
}
