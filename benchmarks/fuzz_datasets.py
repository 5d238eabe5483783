"""Fuzzes the metadata of datasets: whatever is in them, `flexor data` reads it or refuses it with a message.

    python benchmarks/fuzz_datasets.py [--inputs 100000] [--seed 0]

Each input is a small dataset with a mutated info.json, episode table, task table or statistics. It is opened,
described, checked, repaired and streamed in turn. No file may be written outside, nothing may be run, no other
exception may leave, nothing may take more than 10 s, and the memory of the process may not grow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fuzzing import Make, fuzz
from support import foreign_datasets, legacy, small_datasets


def prepare(folder: Path) -> tuple[Make, Mapping[str, Callable[[Path], Any]]]:
    bases = [small_datasets.write(folder / "v3", still=True), legacy.to_v2(folder / "v3", folder / "v21")]

    def make(root: Path, number: int, rng: np.random.Generator, canary: Path) -> str:
        foreign_datasets.linked(bases[number % len(bases)], root)
        return foreign_datasets.mutate(root, rng, canary)

    return make, foreign_datasets.ACTIONS


if __name__ == "__main__":
    raise SystemExit(fuzz(__doc__, 100_000, prepare))
