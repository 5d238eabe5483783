"""Checkpoints both ways: each program saves and trains policies, each acts with those of the other.

Called by run.py; `rows` gives the rows of its table. The policies that are trained are in `cases.py` of their kind.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from flexor.evaluate.envs import make_env, observation_to_batch, stack_batch
from flexor.policies.pretrained import load_pretrained, save_pretrained
from flexor.policies.weight_names import unique_state
from parity import flexor_side
from parity.fill import fill, uniform
from parity.inputs import BATCH, observation_sequence
from parity.kinds import cases_of, part, placed, prepared
from parity.limits import IN_BF16, LIVE, Row
from parity.records import difference, numbers

IMAGE_SIZE = 72  # of the built-in task's own 32 pixels, a ResNet leaves one
IN_BF16_LABEL = ", in bfloat16"
Observations = dict[str, np.ndarray]
FLEXOR = [sys.executable, "-m", "flexor"]
TRAIN = ["--batch_size=2", "--num_workers=0", "--log_freq=1", "--env_eval_freq=0"]


class Exchange:
    """A kind of policy, a folder to work in, and the two programs."""

    def __init__(self, kind: str, lerobot: Path, folder: Path):
        self.kind = kind
        self.lerobot = lerobot
        self.folder = folder
        self.settings = part(kind, "cases")
        self.cases = cases_of(kind, folder / "files")
        self.steps = getattr(self.settings, "TRAINED_STEPS", 3)

    def rows(self) -> Iterator[Row]:
        trained = self.trained() if hasattr(self.settings, "TRAINED") else ()
        for name, far in chain(self.saved(), trained):
            yield Row(f"{self.kind}: {name}", far, IN_BF16 if name.endswith(IN_BF16_LABEL) else LIVE)

    def run(self, *command: object) -> str:
        words = [str(word) for word in command]
        done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        return done.stdout + done.stderr

    def lerobot_does(self, verb: str, *checkpoints: Path) -> None:
        self.run(self.lerobot, "-m", "parity.exchange_lerobot", verb, self.kind, *checkpoints)

    def saved(self) -> Iterator[tuple[str, float]]:
        """A checkpoint of every case, by either program."""
        for name in self.cases:
            self.save_here(name)
        self.lerobot_does("save")
        acts = [name for name, case in self.cases.items() if case.get("acts", True)]
        for writer, reader in (("here", "there"), ("there", "here")):
            observed = {self.folder / writer / name: self.observation_sequence(name) for name in acts}
            exact = {path: sequence for path, sequence in observed.items() if not self.in_bf16(path.name)}
            yield f"saved {writer}, acts {reader}", self.compare(exact)
            if len(exact) < len(observed):
                rounded = {path: sequence for path, sequence in observed.items() if path not in exact}
                yield f"saved {writer}, acts {reader}{IN_BF16_LABEL}", self.compare(rounded)

    def in_bf16(self, name: str) -> bool:
        return bool(self.cases[name].get("in_bf16"))

    def save_here(self, name: str) -> None:
        with prepared(self.kind, "flexor", self.folder / "files"):
            made = flexor_side.make_policy(self.kind, self.cases[name])
        getattr(self.settings, "fill_policy", fill)(made.policy)
        weights = unique_state(made.policy)
        if self.in_bf16(name):  # as exported
            dtypes = made.policy.config.acting_dtypes(
                {name: weight.dtype for name, weight in weights.items()}
            )
            weights |= {name: weights[name].to(dtype) for name, dtype in dtypes.items()}
        folder = self.folder / "here" / name
        save_pretrained(folder, made.policy.config, weights, made.preprocessor, made.postprocessor)

    def observation_sequence(self, name: str) -> Observations:
        return observation_sequence(self.cases[name]["robot"], self.settings.STEPS)

    def compare(self, checkpoints: dict[Path, Observations]) -> float:
        """The same observations to both programs: how far their actions are apart."""
        for checkpoint, observations in checkpoints.items():
            np.savez(checkpoint / "seen.npz", **observations)
        self.lerobot_does("act", *checkpoints)
        worst = 0.0
        for checkpoint, observations in checkpoints.items():
            with prepared(self.kind, "flexor", self.folder / "files"):
                overrides = getattr(self.settings, "ACTS_WITH", None)
                ours = flexor_side.act(load_pretrained(str(checkpoint), overrides=overrides), observations)
            theirs = json.loads((checkpoint / "actions.json").read_text())
            acted = [round(number, 4) for number in numbers(theirs)]
            assert len(set(acted)) > len(acted) / 5, (
                f"{checkpoint}: its actions hardly vary, which shows nothing"
            )
            worst = max(worst, difference(ours, theirs))
        return worst

    def trained(self) -> Iterator[tuple[str, float]]:
        """Two policies by each program, and what follows from one of them in the other."""
        self.run(*FLEXOR, "record", "data", "--episodes=3", f"--image-size={IMAGE_SIZE}")
        observed = observations()
        plain = self.arguments(self.settings.TRAINED)
        other = self.arguments({**self.settings.TRAINED, **self.settings.TRAINED_OTHERWISE})
        ours = self.flexor_train("ours", *plain)
        averaged = self.flexor_train("averaged", *other, "--ema.enable=true")
        yield "trained here, also with EMA, acts there", self.compare({ours: observed, averaged: observed})
        theirs = self.lerobot_train("theirs", *plain, "--policy.push_to_hub=false")
        others_run = self.lerobot_train("others", *other, "--policy.push_to_hub=false")
        yield "trained there, acts here", self.compare({theirs: observed, others_run: observed})
        started = self.lerobot_train("started", f"--policy.path={ours}", steps=2)
        self.check_kept(ours, started)
        yield "lerobot-train --policy.path=OURS, acts here", self.compare({started: observed})
        resumed = self.resume_there("ours")
        self.check_kept(ours, resumed)
        yield "lerobot-train --resume of OURS, acts here", self.compare({resumed: observed})
        if hasattr(self.settings, "OTHER_OPTIMIZER"):
            other = self.flexor_train("other optimizer", *plain, *self.settings.OTHER_OPTIMIZER)
            self.check_kept(other, self.resume_there("other optimizer"))
            yield "lerobot-train --resume of OURS with another optimizer", 0.0
        onwards = self.flexor_train("onwards", f"--policy.path={theirs}", steps=2)
        self.check_kept(theirs, onwards)
        yield "flexor train --policy.path=THEIRS, acts there", self.compare({onwards: observed})
        self.evaluate_here(theirs)
        yield "flexor eval THEIRS runs", 0.0

    def arguments(self, settings: dict) -> list[str]:
        flags = {"type": self.kind, "device": "cpu", **placed(settings, self.folder / "files")}
        return [f"--policy.{name}={value}" for name, value in flags.items()]

    def flexor_train(self, name: str, *more: str, steps: int = 0) -> Path:
        long = f"--steps={steps or self.steps}"
        self.run(*FLEXOR, "train", "--dataset.root=data", *TRAIN, f"--output_dir={name}", long, *more)
        return self.checkpoint(name)

    def lerobot_train(self, name: str, *more: str, steps: int = 0) -> Path:
        program = [self.lerobot, "-m", "lerobot.scripts.lerobot_train"]
        data = ["--dataset.repo_id=parity/place", "--dataset.root=data", "--dataset.video_backend=pyav"]
        self.run(*program, *data, *TRAIN, f"--output_dir={name}", f"--steps={steps or self.steps}", *more)
        return self.checkpoint(name)

    def checkpoint(self, name: str) -> Path:
        return self.folder / name / "checkpoints/last/pretrained_model"

    def resume_there(self, run: str) -> Path:
        """LeRobot takes a run of ours up where it was, with the optimizer's state and the schedule's."""
        copy = f"{run} resumed"
        shutil.copytree(self.folder / run, self.folder / copy, symlinks=True)
        self.fit_scheduler(self.folder / copy / "checkpoints/last/training_state/scheduler_state.json")
        config = self.checkpoint(copy) / "train_config.json"
        steps = self.steps + 2
        resumed = self.lerobot_train(copy, f"--config_path={config}", "--resume=true", steps=steps)
        assert resumed.resolve().parent.name == f"{steps:06d}"
        return resumed

    def fit_scheduler(self, file: Path) -> None:
        """LeRobot takes no schedule's state but one with the very keys of its own torch, where 2.7 has one less."""
        ask = "import torch; print(hasattr(torch.optim.lr_scheduler.LRScheduler, '_is_initial'))"
        if self.run(self.lerobot, "-c", ask).strip() == "False":
            state = json.loads(file.read_text())
            state.pop("_is_initial", None)
            file.write_text(json.dumps(state))

    def check_kept(self, before: Path, after: Path) -> None:
        """VQ-BeT's vocabulary, once trained, is not trained again."""
        old, new = (load_file(folder / "model.safetensors") for folder in (before, after))
        vocabulary = [name for name in old if "vqvae_model" in name]
        assert all(torch.equal(old[name], new[name]) for name in vocabulary), "the vocabulary has changed"
        assert any(not torch.equal(old[name], new[name]) for name in old), "nothing was trained"

    def evaluate_here(self, checkpoint: Path) -> None:
        short = ["--eval.n_episodes=2", "--eval.batch_size=2", "--env.max_steps=4"]
        size = f"--env.kwargs.image_size={IMAGE_SIZE}"
        output = self.run(*FLEXOR, "eval", checkpoint, "--env.type=place", size, *short)
        assert "success" in output


def observations(steps: int = 8) -> Observations:
    """What the built-in task shows over some steps in BATCH episodes: [steps, B, ...]."""
    envs = [make_env("place", image_size=IMAGE_SIZE) for _ in range(BATCH)]
    now = [env.reset(seed=seed)[0] for seed, env in enumerate(envs)]
    batches = []
    for step in range(steps):
        batches.append(stack_batch([observation_to_batch(each) for each in now]))
        now = [env.step(uniform(f"action {step}", (3,), -1, 1))[0] for env in envs]
    return stack_batch(batches)
