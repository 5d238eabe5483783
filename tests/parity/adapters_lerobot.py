"""Adapters in LeRobot, where `lerobot` and `peft` are installed: python -m parity.adapters_lerobot FOLDER

Acts with those in here/adapter, loaded as its training loads them, and saves others as its training does, in there.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from parity.fill import uniform
from parity.lerobot_side import Made, act

SETTINGS = {
    "method_type": "LORA",
    "r": 3,
    "lora_alpha": 5,
    "target_modules": ["linear1", "encoder_robot_state_input_proj", "linear2"],
    "full_training_modules": ["action_head"],
}


def load(folder: Path) -> Any:
    """A policy with adapters."""
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import make_policy

    config = PreTrainedConfig.from_pretrained(folder)
    assert config.use_peft
    config.pretrained_path, config.device = folder, "cpu"
    features = {
        key: {"dtype": "float32", "shape": feature.shape, "names": None}
        for key, feature in {**config.input_features, **config.output_features}.items()
    }
    return make_policy(config, ds_meta=SimpleNamespace(features=features, stats=None))


def save(base: Path, folder: Path) -> Any:
    from lerobot.policies.factory import get_policy_class

    policy = get_policy_class("act").from_pretrained(base)
    policy.config.pretrained_path = base
    wrapped = policy.wrap_with_peft(peft_cli_overrides=SETTINGS)
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.from_numpy(uniform(name, tuple(parameter.shape), -0.5, 0.5)))
    wrapped.save_pretrained(folder)
    policy.config.use_peft = True
    policy.config.save_pretrained(folder)
    return wrapped


def main(path: str) -> None:
    from lerobot.policies.factory import make_pre_post_processors

    torch.set_num_threads(1)
    folder = Path(path)
    observations = dict(np.load(folder / "seen.npz"))
    for saved, policy in (
        (folder / "here/adapter", load(folder / "here/adapter")),
        (folder / "there", save(folder / "base", folder / "there")),
    ):
        around = make_pre_post_processors(policy.config, pretrained_path=str(folder / "here/adapter"))
        if saved.name == "there":
            for piece in around:
                piece.save_pretrained(saved)
        actions = act("act", Made(policy.eval(), *around), observations)
        (saved / "actions.json").write_text(json.dumps(actions))


if __name__ == "__main__":
    main(sys.argv[1])
