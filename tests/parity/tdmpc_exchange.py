"""TD-MPC checkpoints both ways: each program trains a few steps, each acts with what the other trained.

    python tests/parity/tdmpc_exchange.py CHECKPOINT observations.npz actions.npz

acts in LeRobot, where that is installed; `rows` gives the rows of the table of run.py. What a plan draws is
the same on both sides (tdmpc_cases.py).
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tdmpc_cases as cases
import torch
from fill import uniform

SIZE = 40  # the built-in task's own 32 pixels are too few for LeRobot's encoder
SETTINGS = {
    "type": "tdmpc",
    "device": "cpu",
    "mlp_dim": 32,
    "image_encoder_hidden_dim": 8,
    "n_gaussian_samples": 32,
    "n_pi_samples": 8,
    "n_elites": 10,
}
WHOLE_PLAN = ("--policy.n_action_repeats=1", "--policy.n_action_steps=3", "--policy.q_ensemble_size=2")


def act_there(checkpoint: Path, observations: dict[str, np.ndarray]) -> np.ndarray:
    """Actions [steps, B, A] of LeRobot for observations [steps, B, ...]."""
    from lerobot.configs.train import TrainPipelineConfig
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.policies.tdmpc.modeling_tdmpc import TDMPCPolicy
    from tdmpc_lerobot import drawing_for_planning

    policy = TDMPCPolicy.from_pretrained(checkpoint, strict=True)
    before, after = make_pre_post_processors(policy.config, pretrained_path=str(checkpoint))
    settings = TrainPipelineConfig.from_pretrained(checkpoint)
    assert settings.policy.type == "tdmpc" and settings.optimizer is not None
    policy.reset()
    actions = []
    for step in range(cases.STEPS):
        now = {key: torch.from_numpy(values[step]) for key, values in observations.items()}
        now = {key: v.float() / 255 if v.dtype == torch.uint8 else v for key, v in now.items()}
        with drawing_for_planning(policy.config, step):
            actions.append(after(policy.select_action(before(now))).numpy())
    return np.stack(actions)


def act_here(checkpoint: Path, observations: dict[str, np.ndarray]) -> np.ndarray:
    from unittest.mock import patch

    from tdmpc_flexor import GivenNoise

    from flexor.policies.actor import PolicyActor
    from flexor.policies.pretrained import load_pretrained

    actor = PolicyActor(load_pretrained(str(checkpoint)))
    actor.reset(cases.BATCH)
    with patch("flexor.policies.actor.Noise", GivenNoise):
        steps = [{key: values[t] for key, values in observations.items()} for t in range(cases.STEPS)]
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
    policy = [f"--policy.{key}={value}" for key, value in SETTINGS.items()]

    def compare(checkpoint: Path) -> float:
        exchange.run([lerobot, Path(__file__).absolute(), checkpoint, "seen.npz", folder / "there.npz"])
        theirs = np.load(folder / "there.npz")["actions"]
        return difference(act_here(checkpoint, seen).tolist(), theirs.tolist())

    ours = exchange.flexor_train("ours", *policy, "--steps=4", "--optimizer.lr=1e-3")
    yield "tdmpc trained here, acts there", compare(ours)
    averaged = exchange.flexor_train("whole", *policy, *WHOLE_PLAN, "--steps=3", "--ema.enable=true")
    yield "tdmpc trained here with EMA, whole plans, acts there", compare(averaged)
    started = exchange.lerobot_train("started", f"--policy.path={ours}", "--steps=2")
    yield "tdmpc: lerobot-train --policy.path=OURS, acts here", compare(started)
    shutil.copytree(folder / "ours", folder / "resumed", symlinks=True)
    settings = folder / "resumed/checkpoints/last/pretrained_model/train_config.json"
    resumed = exchange.lerobot_train("resumed", f"--config_path={settings}", "--resume=true", "--steps=6")
    assert resumed.resolve().parent.name == "000006"
    yield "tdmpc: lerobot-train --resume of OURS, acts here", compare(resumed)
    theirs = exchange.lerobot_train("theirs", *policy, "--policy.push_to_hub=false", "--steps=3")
    yield "tdmpc trained there, acts here", compare(theirs)
    onwards = exchange.flexor_train("onwards", f"--policy.path={theirs}", "--steps=2")
    yield "tdmpc: flexor train --policy.path=THEIRS, acts there", compare(onwards)


if __name__ == "__main__":
    torch.set_num_threads(1)
    np.savez(sys.argv[3], actions=act_there(Path(sys.argv[1]), dict(np.load(sys.argv[2]))))
