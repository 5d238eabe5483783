"""Act with a diffusion checkpoint in LeRobot, with given noise: run where `lerobot` is installed.

python tests/parity/diffusion_exchange_lerobot.py CHECKPOINT observations.npz actions.npz
"""

import sys
from pathlib import Path

import numpy as np
import torch
from act_lerobot import tensors
from diffusion_lerobot import start, step_noise


def act(checkpoint: Path, observations: dict[str, np.ndarray]) -> np.ndarray:
    """Actions [steps, B, A] for observations [steps, B, ...]."""
    from lerobot.configs.train import TrainPipelineConfig
    from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
    from lerobot.policies.factory import make_pre_post_processors

    policy = DiffusionPolicy.from_pretrained(checkpoint, strict=True)
    before, after = make_pre_post_processors(policy.config, pretrained_path=str(checkpoint))
    settings = TrainPipelineConfig.from_pretrained(checkpoint)
    assert settings.policy.type == "diffusion" and settings.optimizer is not None
    assert settings.policy.input_features == policy.config.input_features

    policy.reset()
    horizon = {"horizon": policy.config.horizon}
    actions = []
    for step in range(len(next(iter(observations.values())))):
        seen = before(tensors({key: values[step] for key, values in observations.items()}))
        with step_noise(policy, f"act {step}"):
            action = policy.select_action(seen, noise=start(f"act {step}", horizon))
        actions.append(after(action).numpy())
    return np.stack(actions)


if __name__ == "__main__":
    torch.set_num_threads(1)
    np.savez(sys.argv[3], actions=act(Path(sys.argv[1]), dict(np.load(sys.argv[2]))))
