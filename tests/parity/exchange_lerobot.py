"""Checkpoints in LeRobot: run where `lerobot` is installed, in a folder that both programs work in.

    python -m parity.exchange_lerobot save KIND
    python -m parity.exchange_lerobot act KIND CHECKPOINT ...

The first writes a checkpoint of every case of a kind of policy, as there/CASE. The second shows each checkpoint the
observations in CHECKPOINT/seen.npz and writes CHECKPOINT/actions.json. It loads everything in the folder the ways
LeRobot does: policy, both processors, and training settings if there are some.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from parity.fill import fill
from parity.kinds import cases_of, lerobot_type, part, prepared
from parity.lerobot_side import Made, act, make_policy


def save(kind: str) -> None:
    fill_policy = getattr(part(kind, "cases"), "fill_policy", fill)
    for name, case in cases_of(kind, Path("files").absolute()).items():
        made = make_policy(kind, case)
        fill_policy(made.policy)
        for piece in made:
            piece.save_pretrained(Path("there") / name)


def load(kind: str, checkpoint: Path) -> Made:
    from lerobot.configs.train import TrainPipelineConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors
    from lerobot.processor import PolicyProcessorPipeline

    policy = get_policy_class(lerobot_type(kind)).from_pretrained(checkpoint, strict=True)
    processors = make_pre_post_processors(policy.config, pretrained_path=str(checkpoint))
    for name, made in zip(("policy_preprocessor", "policy_postprocessor"), processors):
        loaded = PolicyProcessorPipeline.from_pretrained(checkpoint, config_filename=f"{name}.json")
        assert [type(step) for step in loaded.steps] == [type(step) for step in made.steps]
    if (checkpoint / "train_config.json").is_file():
        settings = TrainPipelineConfig.from_pretrained(checkpoint)
        assert settings.policy.type == lerobot_type(kind)
        assert settings.policy.input_features == policy.config.input_features
        # as text, in which it does not matter whether a pair came out as a list
        expected, preset = settings.optimizer, policy.config.get_optimizer_preset()
        assert json.dumps(asdict(expected)) == json.dumps(asdict(preset)), (expected, preset)
        assert settings.scheduler == policy.config.get_scheduler_preset()
    return Made(policy, *processors)


def main(verb: str, kind: str, *checkpoints: str) -> None:
    torch.set_num_threads(1)
    with prepared(kind, "lerobot", Path("files").absolute()):
        if verb == "save":
            save(kind)
        for checkpoint in map(Path, checkpoints):
            observations = dict(np.load(checkpoint / "seen.npz"))
            (checkpoint / "actions.json").write_text(
                json.dumps(act(kind, load(kind, checkpoint), observations))
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
