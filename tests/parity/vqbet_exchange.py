"""VQ-BeT checkpoints both ways: each program trains through both phases, each acts with what the other trained.

    python tests/parity/vqbet_exchange.py                                            with $LEROBOT_PYTHON as in run.py
    python tests/parity/vqbet_exchange.py CHECKPOINT observations.npz actions.npz    acts in LeRobot

`rows` gives the rows of the table of run.py. Which codes are drawn is the same on both sides (vqbet_cases.py).
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import vqbet_cases as cases
from fill import uniform

SIZE = 72  # of the built-in task's own 32 pixels, a ResNet leaves one
PHASE = 60  # steps until codes that nothing is mapped to are among the others again
SETTINGS = {
    "type": "vqbet",
    "device": "cpu",
    "pretrained_backbone_weights": "null",
    "crop_shape": "[64,64]",
    "spatial_softmax_num_keypoints": 8,
    "n_vqvae_training_steps": PHASE,
    "vqvae_embedding_dim": 16,
    "vqvae_enc_hidden_dim": 32,
    "gpt_block_size": 20,
    "gpt_input_dim": 32,
    "gpt_output_dim": 32,
    "gpt_n_layer": 2,
    "gpt_n_head": 2,
    "gpt_hidden_dim": 32,
    "scheduler_warmup_steps": 1,
}
OTHER = {
    "use_group_norm": "true",
    "sequentially_select": "true",
    "bet_softmax_temperature": 1.0,
    "n_obs_steps": 2,
    "n_action_pred_token": 1,
    "action_chunk_size": 3,
    "vqvae_n_embed": 7,
}


def act_there(checkpoint: Path, observations: dict[str, np.ndarray]) -> np.ndarray:
    """Actions [steps, B, A] of LeRobot for observations [steps, B, ...]."""
    from lerobot.configs.train import TrainPipelineConfig
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.policies.vqbet.modeling_vqbet import VQBeTPolicy
    from vqbet_lerobot import codes

    policy = VQBeTPolicy.from_pretrained(checkpoint, strict=True)
    before, after = make_pre_post_processors(policy.config, pretrained_path=str(checkpoint))
    settings = TrainPipelineConfig.from_pretrained(checkpoint)
    assert settings.policy.type == settings.scheduler.type == "vqbet"
    drawn = {"settings": {"sequentially_select": policy.config.sequentially_select}}
    policy.reset()
    actions = []
    for step in range(cases.STEPS):
        now = {key: torch.from_numpy(values[step]) for key, values in observations.items()}
        now = {key: v.float() / 255 if v.dtype == torch.uint8 else v for key, v in now.items()}
        with codes(drawn, f"act {step}"):
            actions.append(after(policy.select_action(before(now))).numpy())
    return np.stack(actions)


def act_here(checkpoint: Path, observations: dict[str, np.ndarray]) -> np.ndarray:
    from unittest.mock import patch

    from vqbet_flexor import GivenNoise

    from flexor.policies.actor import PolicyActor
    from flexor.policies.pretrained import load_pretrained

    actor = PolicyActor(load_pretrained(str(checkpoint)))
    actor.reset(cases.BATCH)
    steps = [{key: values[t] for key, values in observations.items()} for t in range(cases.STEPS)]
    with patch("flexor.policies.actor.Noise", lambda seed, step, episodes: GivenNoise(f"act {step}")):
        return np.stack([actor.act(seen, [""] * cases.BATCH) for seen in steps])


def observations() -> dict[str, np.ndarray]:
    """What the built-in task shows over the steps of a few episodes: [steps, B, ...]."""
    from flexor.sim.envs import make_env, observation_to_batch, stack_batch

    envs = [make_env("place", image_size=SIZE) for _ in range(cases.BATCH)]
    now = [env.reset(seed=seed)[0] for seed, env in enumerate(envs)]
    seen = []
    for step in range(cases.STEPS):
        seen.append(stack_batch([observation_to_batch(each) for each in now]))
        now = [env.step(uniform(f"action {step}", (3,), -1, 1))[0] for env in envs]
    return stack_batch(seen)


def rows(lerobot: Path, folder: Path) -> Iterator[tuple[str, float]]:
    """What was exchanged, and how far the two programs' actions are apart."""
    import shutil

    from exchange_flexor import FLEXOR, Exchange
    from records import difference

    exchange = Exchange.__new__(Exchange)  # with data of its own
    exchange.lerobot, exchange.folder = lerobot, folder
    exchange.run([*FLEXOR, "record", "data", "--episodes=3", f"--image-size={SIZE}"])
    seen = observations()
    np.savez(folder / "seen.npz", **seen)
    plain, other = (
        [f"--policy.{key}={value}" for key, value in settings.items()]
        for settings in (SETTINGS, {**SETTINGS, **OTHER})
    )
    both_phases, further = f"--steps={PHASE + 2}", f"--steps={PHASE + 4}"

    def compare(checkpoint: Path) -> float:
        exchange.run([lerobot, Path(__file__).absolute(), checkpoint, "seen.npz", folder / "there.npz"])
        theirs = np.load(folder / "there.npz")["actions"]
        return difference(act_here(checkpoint, seen).tolist(), theirs.tolist())

    ours = exchange.flexor_train("ours", *plain, both_phases)
    yield "vqbet trained here, acts there", compare(ours)
    averaged = exchange.flexor_train("averaged", *other, both_phases, "--ema.enable=true")
    yield "vqbet trained here otherwise, with EMA, acts there", compare(averaged)
    started = exchange.lerobot_train("started", f"--policy.path={ours}", "--steps=2")
    yield "vqbet: lerobot-train --policy.path=OURS, acts here", compare(started)
    assert same_codes(ours, started), "a vocabulary that was trained here was trained again there"
    shutil.copytree(folder / "ours", folder / "resumed", symlinks=True)
    settings = folder / "resumed/checkpoints/last/pretrained_model/train_config.json"
    resumed = exchange.lerobot_train("resumed", f"--config_path={settings}", "--resume=true", further)
    assert resumed.resolve().parent.name == f"{PHASE + 4:06d}" and same_codes(ours, resumed)
    yield "vqbet: lerobot-train --resume of OURS, acts here", compare(resumed)
    theirs = exchange.lerobot_train("theirs", *plain, "--policy.push_to_hub=false", both_phases)
    yield "vqbet trained there, acts here", compare(theirs)
    otherwise = exchange.lerobot_train("otherwise", *other, "--policy.push_to_hub=false", both_phases)
    yield "vqbet trained there otherwise, acts here", compare(otherwise)
    onwards = exchange.flexor_train("onwards", f"--policy.path={theirs}", "--steps=2")
    yield "vqbet: flexor train --policy.path=THEIRS, acts there", compare(onwards)
    assert same_codes(theirs, onwards), "a vocabulary that was trained there was trained again here"


def same_codes(one: Path, other: Path) -> bool:
    from safetensors.torch import load_file

    here, there = (load_file(folder / "model.safetensors") for folder in (one, other))
    return all(torch.equal(here[name], there[name]) for name in here if "vqvae_model" in name)


def main() -> int:
    import tempfile

    from environment import lerobot_python

    with tempfile.TemporaryDirectory() as folder:
        found = list(rows(lerobot_python(Path(__file__).parents[2]), Path(folder)))
    for what, far in found:
        print(f"{what:60} {far:.1e}")
    return int(any(not far <= 1e-5 for _, far in found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 1:
        sys.exit(main())
    np.savez(sys.argv[3], actions=act_there(Path(sys.argv[1]), dict(np.load(sys.argv[2]))))
