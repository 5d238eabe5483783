"""Checkpoints of multi-task DiTs both ways: what either program saved or trained, both act with alike.

python tests/parity/multi_task_dit_exchange.py      (needs $LEROBOT_PYTHON, which has `transformers` too)
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import exchange_flexor as exchange
import multi_task_dit_cases as cases
import numpy as np
import torch
from fill import fill
from multi_task_dit_clip import make_clips
from multi_task_dit_flexor import GivenNoise, make_policy
from records import difference

from flexor.policies.actor import PolicyActor
from flexor.policies.pretrained import load_pretrained, save_pretrained

POLICY = {
    "type": "multi_task_dit",
    "device": "cpu",
    "hidden_dim": 32,
    "num_heads": 2,
    "num_layers": 2,
    "horizon": 8,
    "n_action_steps": 4,
    "num_train_timesteps": 10,
    "num_integration_steps": 4,
    "image_crop_shape": "null",
    "tokenizer_max_length": 20,
}
FLOW = [
    "--policy.objective=flow_matching",
    "--policy.use_rope=false",
    "--policy.use_positional_encoding=true",
]


class DiTExchange(exchange.Exchange):
    """The same as for ACT, with noise that is given to both programs."""

    def __init__(self, lerobot: Path, folder: Path):
        super().__init__(lerobot, folder)
        self.clips = folder / "clips"
        make_clips(self.clips)
        clip = self.clips / "tiny-clip"
        settings = {**POLICY, "vision_encoder_name": clip, "text_encoder_name": clip}
        self.policy = [f"--policy.{key}={value}" for key, value in settings.items()]

    def rows(self) -> Iterator[exchange.Row]:
        for name in cases.CASES:
            self.save_here(name)
        self.lerobot_does("save", self.clips)
        for where in ("here", "there"):
            far = self.compare_all({f"{where}/{name}": shown(name) for name in cases.CASES})
            yield f"saved {where}, acts {'there' if where == 'here' else 'here'}", max(far)
        yield from self.ours_there()
        yield from self.theirs_here()

    def lerobot_does(self, verb: str, *paths: object) -> None:
        script = exchange.HERE / "multi_task_dit_exchange_lerobot.py"
        self.run([self.lerobot, script, verb, self.folder, *paths])

    def compare(self, checkpoint: Path) -> float:
        path = checkpoint.relative_to(self.folder).as_posix()
        return self.compare_all({path: exchange.observations()})[0]

    def compare_all(self, checkpoints: dict[str, dict[str, np.ndarray]]) -> list[float]:
        """The same observations to both programs: how far their actions are apart."""
        names = {path: path.replace("/", "-") for path in checkpoints}
        for path, seen in checkpoints.items():
            np.savez(self.folder / f"{names[path]}-seen.npz", **seen)
        self.lerobot_does("act", *checkpoints)
        far = []
        for path, seen in checkpoints.items():
            theirs = np.load(self.folder / f"{names[path]}-acted.npz")["actions"]
            far.append(difference(act(self.folder / path, seen).tolist(), theirs.tolist()))
        return far

    def save_here(self, name: str) -> None:
        made = make_policy(cases.CASES[name], self.clips)
        fill(made.policy)
        folder, weights = self.folder / f"here/{name}", made.policy.state_dict()
        save_pretrained(folder, made.policy.config, weights, made.preprocessor, made.postprocessor)

    def ours_there(self) -> Iterator[exchange.Row]:
        """LeRobot acts with our checkpoints, starts from one, and resumes a run of ours."""
        plain = self.flexor_train("ours", *self.policy, "--steps=3")
        yield "trained here, acts there", self.compare(plain)
        flow = self.flexor_train("flow", *self.policy, *FLOW, "--steps=3", "--ema.enable=true")
        yield "trained here by flow matching with EMA, acts there", self.compare(flow)
        started = self.lerobot_train("started", f"--policy.path={plain}", "--steps=2")
        yield "lerobot-train --policy.path=OURS, acts here", self.compare(started)
        shutil.copytree(self.folder / "ours", self.folder / "resumed", symlinks=True)
        settings = self.folder / "resumed/checkpoints/last/pretrained_model/train_config.json"
        resumed = self.lerobot_train("resumed", f"--config_path={settings}", "--resume=true", "--steps=5")
        assert resumed.resolve().parent.name == "000005"
        yield "lerobot-train --resume of OURS, acts here", self.compare(resumed)

    def theirs_here(self) -> Iterator[exchange.Row]:
        """We act with LeRobot's checkpoint, and start from it."""
        theirs = self.lerobot_train("theirs", *self.policy, "--policy.push_to_hub=false", "--steps=3")
        yield "trained there, acts here", self.compare(theirs)
        ours = self.flexor_train("onwards", f"--policy.path={theirs}", "--steps=2")
        yield "flexor train --policy.path=THEIRS, acts there", self.compare(ours)


def shown(name: str) -> dict[str, np.ndarray]:
    """[steps, B, ...]"""
    inputs = cases.CASES[name]["inputs"]
    seen = [cases.observation(inputs, f"step {step}") for step in range(cases.STEPS)]
    return {key: np.stack([each[key] for each in seen]) for key in seen[0]}


def act(checkpoint: Path, seen: dict[str, np.ndarray]) -> np.ndarray:
    pretrained = load_pretrained(str(checkpoint))
    settings = {"horizon": pretrained.policy.config.horizon}
    actor = PolicyActor(pretrained)
    actor.reset(cases.BATCH)
    with patch("flexor.policies.actor.Noise", lambda seed, step, ids: GivenNoise(f"act {step}", settings)):
        return np.stack(
            [actor.act({k: v[t] for k, v in seen.items()}, cases.TASKS) for t in range(cases.STEPS)]
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for what, far in DiTExchange(Path(os.environ["LEROBOT_PYTHON"]), Path(folder)).rows():
            print(f"{what:52} {far:.1e}", flush=True)
