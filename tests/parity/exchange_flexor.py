"""Checkpoints both ways: each program trains a few steps, each acts with what the other trained.

Called by run.py; every function gives the rows of its table.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from act_cases import BATCH, STEPS
from fill import uniform
from records import difference

from flexor.policies.actor import PolicyActor
from flexor.policies.pretrained import load_pretrained
from flexor.sim.envs import make_env, observation_to_batch, stack_batch

HERE = Path(__file__).parent
Row = tuple[str, float]
FLEXOR = [sys.executable, "-m", "flexor"]
TRAIN = ["--batch_size=2", "--num_workers=0", "--log_freq=1", "--env_eval_freq=0"]
POLICY = {
    "type": "act",
    "device": "cpu",
    "pretrained_backbone_weights": "null",
    "dim_model": 32,
    "n_heads": 2,
    "dim_feedforward": 32,
    "chunk_size": 8,
    "n_action_steps": 4,
    "n_encoder_layers": 1,
    "n_vae_encoder_layers": 1,
    "latent_dim": 4,
}


class Exchange:
    """A dataset, a folder to work in, and the two programs."""

    def __init__(self, lerobot: Path, folder: Path):
        self.lerobot = lerobot
        self.folder = folder
        self.run([*FLEXOR, "record", "data", "--episodes=3"])
        np.savez(folder / "seen.npz", **observations())

    def rows(self) -> Iterator[Row]:
        yield from self.ours_there()
        yield from self.theirs_here()

    def run(self, command: list[object]) -> str:
        words = [str(word) for word in command]
        done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        return done.stdout + done.stderr

    def flexor_train(self, name: str, *more: str) -> Path:
        self.run([*FLEXOR, "train", "--dataset.root=data", *TRAIN, f"--output_dir={name}", *more])
        return self.folder / name / "checkpoints/last/pretrained_model"

    def lerobot_train(self, name: str, *more: str) -> Path:
        program = [self.lerobot, "-m", "lerobot.scripts.lerobot_train"]
        data = ["--dataset.repo_id=parity/place", "--dataset.root=data", "--dataset.video_backend=pyav"]
        self.run([*program, *data, *TRAIN, f"--output_dir={name}", *more])
        return self.folder / name / "checkpoints/last/pretrained_model"

    def compare(self, checkpoint: Path) -> float:
        """The same observations to both programs: how far their actions are apart."""
        self.run(
            [self.lerobot, HERE / "exchange_lerobot.py", checkpoint, "seen.npz", self.folder / "there.npz"]
        )
        theirs = np.load(self.folder / "there.npz")["actions"]
        return difference(act(checkpoint).tolist(), theirs.tolist())

    def ours_there(self) -> Iterator[Row]:
        """LeRobot acts with our checkpoints, starts from one, and resumes a run of ours."""
        policy = [f"--policy.{key}={value}" for key, value in POLICY.items()]
        plain = self.flexor_train("ours", *policy, "--steps=3")
        yield "trained here, acts there", self.compare(plain)
        averaged = self.flexor_train("ema", *policy, "--steps=3", "--ema.enable=true", "--optimizer.lr=1e-3")
        yield "trained here with EMA, acts there", self.compare(averaged)
        ensemble = ["--policy.n_action_steps=1", "--policy.temporal_ensemble_coeff=0.01"]
        together = self.flexor_train("ensemble", *policy, "--steps=1", *ensemble)
        yield "trained here with ensembling, acts there", self.compare(together)

        started = self.lerobot_train("started", f"--policy.path={plain}", "--steps=2")
        yield "lerobot-train --policy.path=OURS, acts here", self.compare(started)
        shutil.copytree(self.folder / "ours", self.folder / "resumed", symlinks=True)
        settings = self.folder / "resumed/checkpoints/last/pretrained_model/train_config.json"
        resumed = self.lerobot_train("resumed", f"--config_path={settings}", "--resume=true", "--steps=5")
        assert resumed.resolve().parent.name == "000005"
        yield "lerobot-train --resume of OURS, acts here", self.compare(resumed)

    def theirs_here(self) -> Iterator[Row]:
        """We act with LeRobot's checkpoint, start from it and evaluate it."""
        settings = {**POLICY, "push_to_hub": "false"}
        policy = [f"--policy.{key}={value}" for key, value in settings.items()]
        theirs = self.lerobot_train("theirs", *policy, "--steps=3")
        yield "trained there, acts here", self.compare(theirs)
        ours = self.flexor_train("onwards", f"--policy.path={theirs}", "--steps=2")
        yield "flexor train --policy.path=THEIRS, acts there", self.compare(ours)
        short = ["--eval.n_episodes=2", "--eval.batch_size=2", "--env.max_steps=8"]
        said = self.run([*FLEXOR, "eval", theirs, "--env.type=place", *short])
        assert "success" in said
        yield "flexor eval THEIRS runs", 0.0


def observations() -> dict[str, np.ndarray]:
    """What the built-in task shows over STEPS steps in BATCH episodes: [steps, B, ...]."""
    envs = [make_env("place") for _ in range(BATCH)]
    now = [env.reset(seed=seed)[0] for seed, env in enumerate(envs)]
    seen = []
    for step in range(STEPS):
        seen.append(stack_batch([observation_to_batch(each) for each in now]))
        now = [env.step(uniform(f"action {step}", (3,), -1, 1))[0] for env in envs]
    return stack_batch(seen)


def act(checkpoint: Path) -> np.ndarray:
    actor = PolicyActor(load_pretrained(str(checkpoint)))
    actor.reset(BATCH)
    seen = observations()
    return np.stack([actor.act({k: v[t] for k, v in seen.items()}, [""] * BATCH) for t in range(STEPS)])
