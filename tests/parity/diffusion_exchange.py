"""Diffusion's checkpoints both ways: each program trains a few steps, each acts with what the other trained.

    python tests/parity/diffusion_exchange.py            with $LEROBOT_PYTHON as in run.py

`Exchange` trains and keeps the folder; here is what differs: settings, and noise that both are given.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import exchange_flexor
import numpy as np
from act_cases import BATCH, STEPS
from diffusion_flexor import GivenNoise
from environment import lerobot_python
from exchange_flexor import FLEXOR, Exchange, Row
from records import difference

from flexor.policies.actor import PolicyActor
from flexor.policies.pretrained import load_pretrained
from flexor.sim.envs import make_env

POLICY = {
    "type": "diffusion",
    "device": "cpu",
    "pretrained_backbone_weights": "null",
    "horizon": 8,
    "n_action_steps": 4,
    "down_dims": "[16,32]",
    "diffusion_step_embed_dim": 16,
    "spatial_softmax_num_keypoints": 8,
    "num_train_timesteps": 20,
}
OTHERS = {
    "as it is": {},
    "group norm, crop, DDIM": {
        "use_group_norm": "true",
        "crop_shape": "[60,65]",
        "noise_scheduler_type": "DDIM",
        "num_inference_steps": 5,
    },
    "resize and crop, sample, 3 observations": {
        "resize_shape": "[70,96]",
        "crop_ratio": 0.9,
        "prediction_type": "sample",
        "n_obs_steps": 3,
        "use_film_scale_modulation": "false",
        "do_mask_loss_for_padding": "true",
    },
}


SIZE = 72  # of the built-in task's own 32 pixels, a ResNet leaves one


class DiffusionExchange(Exchange):
    def __init__(self, lerobot: Path, folder: Path):
        self.lerobot = lerobot
        self.folder = folder
        self.run([*FLEXOR, "record", "data", "--episodes=3", f"--image-size={SIZE}"])
        np.savez(folder / "seen.npz", **observations())

    def rows(self) -> Iterator[Row]:
        for number, (name, changed) in enumerate(OTHERS.items()):
            policy = [f"--policy.{key}={value}" for key, value in {**POLICY, **changed}.items()]
            ours = self.flexor_train(f"ours{number}", *policy, "--steps=3")
            yield f"diffusion, {name}: trained here, acts there", self.compare(ours)
            theirs = self.lerobot_train(f"theirs{number}", *policy, "--policy.push_to_hub=false", "--steps=3")
            yield f"diffusion, {name}: trained there, acts here", self.compare(theirs)
        onwards = self.flexor_train("onwards", f"--policy.path={theirs}", "--steps=2")
        yield "flexor train --policy.path=THEIRS, acts there", self.compare(onwards)
        started = self.lerobot_train("started", f"--policy.path={ours}", "--steps=2")
        yield "lerobot-train --policy.path=OURS, acts here", self.compare(started)

    def compare(self, checkpoint: Path) -> float:
        script = exchange_flexor.HERE / "diffusion_exchange_lerobot.py"
        self.run([self.lerobot, script, checkpoint, "seen.npz", self.folder / "there.npz"])
        theirs = np.load(self.folder / "there.npz")["actions"]
        return difference(act(checkpoint).tolist(), theirs.tolist())


def observations() -> dict[str, np.ndarray]:
    with patch("exchange_flexor.make_env", lambda name: make_env(name, image_size=SIZE)):
        return exchange_flexor.observations()


def act(checkpoint: Path) -> np.ndarray:
    pretrained = load_pretrained(str(checkpoint))
    actor = PolicyActor(pretrained)
    actor.reset(BATCH)
    seen = observations()
    horizon = {"horizon": pretrained.policy.config.horizon}
    with patch("flexor.policies.actor.Noise", lambda seed, step, ids: GivenNoise(f"act {step}", horizon)):
        return np.stack([actor.act({k: v[t] for k, v in seen.items()}, [""] * BATCH) for t in range(STEPS)])


def rows(lerobot: Path, folder: Path) -> Iterator[Row]:
    yield from DiffusionExchange(lerobot, folder).rows()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        found = list(rows(lerobot_python(exchange_flexor.HERE.parents[1]), Path(made)))
    for what, far in found:
        print(f"{what:72} {far:.1e}")
    sys.exit(any(not far <= 1e-5 for _, far in found))
