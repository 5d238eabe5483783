"""A run that is killed with -9 again and again, and after each time ends as if nothing had happened.

After a kill, its checkpoints must be complete, and a copy of the run, resumed, must come to the same bits as a run that
nobody killed. Then the run itself is started again, to be killed again.
"""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from flexor.train.checkpoint import folder as checkpoint
from support import ranks, runs, trouble
from support.limits import wait_for
from support.samples import write_lowdim
from support.small_policies import SMALL

STEPS = 12
ACT = [
    "--policy.type=act",
    "--policy.chunk_size=4",
    "--policy.n_action_steps=4",
    "--policy.dim_model=16",
    "--policy.n_heads=2",
    "--policy.dim_feedforward=32",
    "--policy.n_encoder_layers=1",
    "--policy.n_vae_encoder_layers=1",
    "--policy.latent_dim=4",
]
DIFFUSION = ["--policy.type=diffusion", *(f"--policy.{each}" for each in SMALL["diffusion"])]
CASES = {
    "act": (1, [*ACT, "--ema.enable"]),
    "diffusion": (1, [*DIFFUSION, "--checkpoint.keep_last=2"]),
    "act, fsdp": (2, [*ACT, "--parallel.strategy=fsdp", "--checkpoint.keep_last=3"]),
}
EARLY = 0.15  # share of kills while a run starts


@dataclass(frozen=True)
class Kill:
    """What a kill found, and what it left."""

    case: str
    steps: int  # done by then
    saved: int | None  # the newest complete checkpoint
    saving: bool  # whether a save was cut off


class Victim:
    """A run of one case. Each start saves every step, so most instants lie within a save."""

    def __init__(self, case: str, folder: Path, seed: int):
        self.case, self.folder = case, folder
        self.processes, self.policy = CASES[case]
        self.rng = random.Random(f"{case} {seed}")
        folder.mkdir(parents=True)
        self.data = write_lowdim(folder / "data")
        self.starts = self.runs = 0
        self.run = self._new_run()
        self.uninterrupted = folder / "whole"
        self._finish(self.uninterrupted)

    def kill(self) -> Kill:
        """Start the run, kill it at some instant, and check what is left and where it leads. Raises if it differs."""
        started = self._start(self.run)
        if self.rng.random() < EARLY:
            time.sleep(self.rng.random())
        else:
            more = trouble.steps_done(self.run) + self.rng.randint(1, 3)
            wait_for(
                lambda: trouble.steps_done(self.run) >= more or any(r.poll() is not None for r in started.all)
            )
            time.sleep(self.rng.random() * 0.05)
        started.kill()
        folder = self.run / "checkpoints"
        saving = any(folder.glob(".*")) if folder.is_dir() else False
        runs.assert_checkpoints_whole(self.run)
        newest = checkpoint.newest(folder)
        saved = int(newest.name) if newest else None
        self._check_end()
        result = Kill(self.case, trouble.steps_done(self.run), saved, saving)
        if saved == STEPS:
            self.run = self._new_run()
        return result

    def _check_end(self) -> None:
        """A copy of the run, resumed, ends as the run that was not killed."""
        copy = self.folder / "copy"
        if self.run.exists():
            shutil.copytree(self.run, copy, symlinks=True)
        self._finish(copy)
        trouble.assert_same(self.uninterrupted, copy, STEPS)
        runs.assert_checkpoints_whole(copy)
        assert not [path.name for path in (copy / "checkpoints").iterdir() if path.name.startswith(".")]
        shutil.rmtree(copy)

    def _finish(self, run: Path) -> None:
        started = self._start(run)
        assert started.end() == [0] * self.processes, started.errors()

    def _start(self, run: Path) -> ranks.Ranks:
        more = [f"--steps={STEPS}", "--save_freq=1", "--deterministic=true", "--resume=auto", "--plan=false"]
        flags = runs.flags(self.data, run, self.policy, "--policy.device=cpu", *more)
        self.starts += 1
        return ranks.Ranks(self.folder / f"output-{self.starts}", self.processes, ["train", *flags])

    def _new_run(self) -> Path:
        self.runs += 1
        return self.folder / f"run-{self.runs}"
