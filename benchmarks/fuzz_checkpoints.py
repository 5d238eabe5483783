"""Fuzzes runs and checkpoints: whatever is in their files, `flexor` loads it or refuses it with a message.

    python benchmarks/fuzz_checkpoints.py [--inputs 10000] [--seed 0]

Each input is a run of a small policy, one of them saved in shards, with one mutated file: settings, processing,
weights, optimizer state, shards and their index, metrics. Mostly its manifest is made to fit, as somebody would do
who wants it to be loaded. It is loaded for inference, resumed, exported, trained from, and shown in turn.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import environment

HOME = environment.prepare()

import numpy as np  # noqa: E402

from fuzzing import Make, fuzz  # noqa: E402
from support import foreign_checkpoints, ranks, runs, small_policies  # noqa: E402
from support.samples import write_lowdim  # noqa: E402


def prepare(folder: Path) -> tuple[Make, Mapping[str, Callable[[Path], Any]]]:
    data = write_lowdim(folder / "data")
    os.environ["FUZZED_DATA"] = str(data)
    flags = ("--steps=4", "--save_freq=4", "--log_freq=2", "--ema.enable")
    bases = [runs.train(data, folder / "act", small_policies.TINY_ACT, *flags)]
    sharded = runs.flags(
        data, folder / "sharded", small_policies.TINY_ACT, *flags, "--parallel.strategy=fsdp"
    )
    ranks.run(folder / "out", 2, ["train", *sharded])
    bases.append(folder / "sharded")
    diffusion = [*small_policies.small_flags("diffusion", folder / "models"), "--policy.device=cpu"]
    bases.append(runs.train(data, folder / "diffusion", diffusion, *flags))

    def make(run: Path, number: int, rng: np.random.Generator, canary: Path) -> str:
        foreign_checkpoints.copied(bases[number % len(bases)], run)
        return foreign_checkpoints.mutate(run, rng, canary)

    return make, foreign_checkpoints.ACTIONS


if __name__ == "__main__":
    try:
        code = fuzz(__doc__, 10_000, prepare)
    finally:
        environment.remove(HOME)
    raise SystemExit(code)
