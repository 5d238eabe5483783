"""Act with a multi-task DiT's checkpoint in LeRobot: run where `lerobot` and `transformers` are installed.

    python tests/parity/multi_task_dit_exchange_lerobot.py act FOLDER CHECKPOINT ...
    python tests/parity/multi_task_dit_exchange_lerobot.py save FOLDER CLIPS

The first shows each checkpoint the observations in FOLDER/NAME-seen.npz, NAME being the checkpoint's folder with
dashes for slashes, and writes FOLDER/NAME-acted.npz. It loads everything the ways LeRobot does: policy, both
processors, training settings if there are some. The second writes a checkpoint of every case.
"""

import sys
from pathlib import Path

import multi_task_dit_cases as cases
import numpy as np
import torch
from fill import fill
from multi_task_dit_lerobot import acting_noise, make_config


def act(checkpoint: Path, observations: dict[str, np.ndarray]) -> np.ndarray:
    """Actions [steps, B, A] for observations [steps, B, ...]."""
    from lerobot.configs.train import TrainPipelineConfig
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.policies.multi_task_dit.modeling_multi_task_dit import MultiTaskDiTPolicy

    policy = MultiTaskDiTPolicy.from_pretrained(checkpoint, strict=True)
    before, after = make_pre_post_processors(policy.config, pretrained_path=str(checkpoint))
    if (checkpoint / "train_config.json").is_file():
        settings = TrainPipelineConfig.from_pretrained(checkpoint)
        assert settings.policy.type == "multi_task_dit" and settings.optimizer is not None
        assert settings.policy.input_features == policy.config.input_features

    policy.reset()
    actions = []
    noise = {"horizon": policy.config.horizon, "objective": policy.config.objective}
    for step in range(len(next(iter(observations.values())))):
        now = {key: torch.from_numpy(values[step]) for key, values in observations.items()}
        now = {key: v.float() / 255 if v.dtype == torch.uint8 else v for key, v in now.items()}
        with acting_noise(policy, f"act {step}", noise):
            action = policy.select_action(before({**now, "task": cases.TASKS}))
        actions.append(after(action).numpy())
    return np.stack(actions)


def save(name: str, clips: Path, folder: Path) -> None:
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.policies.multi_task_dit.modeling_multi_task_dit import MultiTaskDiTPolicy

    config = make_config(cases.CASES[name], clips)
    policy = MultiTaskDiTPolicy(config)
    fill(policy)
    stats = cases.statistics(cases.CASES[name]["inputs"])
    stats = {k: {n: torch.from_numpy(v) for n, v in s.items()} for k, s in stats.items()}
    for part in (policy, *make_pre_post_processors(config, dataset_stats=stats)):
        part.save_pretrained(folder)


def main(verb: str, folder: Path, *paths: str) -> None:
    torch.set_num_threads(1)
    if verb == "save":
        for name in cases.CASES:
            save(name, Path(paths[0]), folder / f"there/{name}")
        return
    for path in paths:
        name = path.replace("/", "-")
        seen = dict(np.load(folder / f"{name}-seen.npz"))
        np.savez(folder / f"{name}-acted.npz", actions=act(folder / path, seen))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
