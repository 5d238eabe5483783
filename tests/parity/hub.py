"""What Flexor pushes to the Hub, loaded from there by LeRobot: a dataset, a policy, one at an earlier step, a run.

python -m parity.hub OUT     # where lerobot is installed (0.6.1), with HF_ENDPOINT: writes what it loaded to OUT
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np


def rows(lerobot: Path, folder: Path) -> Iterator:
    """Push here, load there, compare."""
    import subprocess

    from huggingface_hub import constants
    from safetensors.numpy import load_file

    from flexor.data.dataset import open_dataset
    from parity.limits import Row
    from support.hub_server import TOKEN, HubServer, log_in

    with HubServer() as server:
        log_in(server.address, TOKEN)
        constants.HF_HUB_OFFLINE = False
        run = push(folder)
        homes = {"HF_HOME": str(folder / "theirs"), "HF_LEROBOT_HOME": str(folder / "theirs/lerobot")}
        env = {
            **os.environ,
            **homes,
            "HF_ENDPOINT": server.address,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
        }
        words = [str(lerobot), "-m", "parity.hub", str(folder / "loaded.npz")]
        done = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-3000:])
    theirs = np.load(folder / "loaded.npz")
    ours = open_dataset(root=folder / "data").columns["observation.state"]
    yield Row("dataset pushed here, loaded there", float(np.abs(theirs["states"] - ours).max()))
    for name in ("000002", "000004", "resumed"):
        saved = load_file(
            run / "checkpoints" / name.replace("resumed", "000004") / "pretrained_model/model.safetensors"
        )
        far = [np.abs(theirs[f"{name}:{weight}"] - value).max(initial=0) for weight, value in saved.items()]
        yield Row(f"policy pushed here, loaded there: {name}", float(max(far)))


def push(folder: Path) -> Path:
    from flexor.cli.main import main

    small = (
        "chunk_size=4",
        "n_action_steps=4",
        "dim_model=16",
        "n_heads=2",
        "dim_feedforward=32",
        "latent_dim=4",
    )
    layers = (
        "n_encoder_layers=1",
        "n_vae_encoder_layers=1",
        "pretrained_backbone_weights=null",
        "device=cpu",
    )
    settings = [f"--policy.{setting}" for setting in (*small, *layers, "type=act", "repo_id=ann/run")]
    more = [
        "--steps=4",
        "--save_freq=2",
        "--batch_size=2",
        "--num_workers=0",
        "--save_checkpoint_to_hub=true",
    ]
    for words in (
        ["record", str(folder / "data"), "--episodes=2", "--image_size=64"],
        ["data", "push", str(folder / "data"), "ann/place"],
        ["train", f"--dataset.root={folder / 'data'}", f"--output_dir={folder / 'run'}", *settings, *more],
        ["push", str(folder / "run"), "--checkpoints"],  # those that were skipped, if any
    ):
        assert main(words) == 0, words
    return folder / "run"


def load(out: Path) -> None:
    """With LeRobot."""
    from lerobot.common.train_utils import resolve_resume_checkpoint
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    dataset = LeRobotDataset("ann/place")
    loaded = {"states": np.stack([dataset[i]["observation.state"].numpy() for i in range(len(dataset))])}
    resumed = resolve_resume_checkpoint("ann/run", Path("resumed"))
    act = get_policy_class("act")
    for name, policy in {
        "000002": act.from_pretrained("ann/run", revision="000002"),
        "000004": act.from_pretrained("ann/run"),
        "resumed": act.from_pretrained(str(resumed / "pretrained_model")),
    }.items():
        loaded |= {f"{name}:{weight}": value.cpu().numpy() for weight, value in policy.state_dict().items()}
    make_pre_post_processors(policy.config, pretrained_path="ann/run")
    np.savez(out, **loaded)


if __name__ == "__main__":
    load(Path(sys.argv[1]))
