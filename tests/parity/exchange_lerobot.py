"""Act with a checkpoint in LeRobot: run where `lerobot` is installed.

    python tests/parity/exchange_lerobot.py CHECKPOINT observations.npz actions.npz

Loads everything in the folder the ways LeRobot does: policy, both processors, training settings.
"""

import sys
from pathlib import Path

import numpy as np
import torch


def act(checkpoint: Path, observations: dict[str, np.ndarray]) -> np.ndarray:
    """Actions [steps, B, A] for observations [steps, B, ...]."""
    from lerobot.configs.train import TrainPipelineConfig
    from lerobot.policies.act.modeling_act import ACTPolicy
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.processor import PolicyProcessorPipeline

    policy = ACTPolicy.from_pretrained(checkpoint, strict=True)
    before, after = make_pre_post_processors(policy.config, pretrained_path=str(checkpoint))
    for name, made in (("policy_preprocessor", before), ("policy_postprocessor", after)):
        file = f"{name}.json"
        loaded = PolicyProcessorPipeline.from_pretrained(checkpoint, config_filename=file)
        assert [type(step) for step in loaded.steps] == [type(step) for step in made.steps]
    settings = TrainPipelineConfig.from_pretrained(checkpoint)
    assert settings.policy.type == "act" and settings.optimizer is not None
    assert settings.policy.input_features == policy.config.input_features

    policy.reset()
    actions = []
    for step in range(len(next(iter(observations.values())))):
        now = {key: torch.from_numpy(values[step]) for key, values in observations.items()}
        now = {key: v.float() / 255 if v.dtype == torch.uint8 else v for key, v in now.items()}
        actions.append(after(policy.select_action(before(now))).numpy())
    return np.stack(actions)


if __name__ == "__main__":
    torch.set_num_threads(1)
    np.savez(sys.argv[3], actions=act(Path(sys.argv[1]), dict(np.load(sys.argv[2]))))
