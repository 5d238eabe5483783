"""Checkpoints of a learner, in the folders and files of LeRobot's: the policy, the algorithm, and an optimizer for each
part. The transitions are not in them: they are in the run's record file, which only grows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flexor.config.schema import TrainConfig
from flexor.core.errors import CheckpointError
from flexor.core.foreign_files import MALFORMED
from flexor.core.log import log
from flexor.core.run_files import PRETRAINED, TRAINING_STATE, WEIGHTS
from flexor.core.typed import to_plain
from flexor.policies.pretrained import Pretrained, load_weights, save_pretrained
from flexor.policies.weight_names import unique_state
from flexor.rl.learner import Learner
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.checkpoint.run_folder import Run

ALGORITHM = "algorithm"
OPTIMIZER_STATE, PARAM_GROUPS = "optimizer_state.safetensors", "optimizer_param_groups.json"


def save_checkpoint(
    run: Run, config: TrainConfig, learner: Learner, pretrained: Pretrained, records: int
) -> Path:
    """`records`: how many of the run's records the learner has learned from."""
    step = learner.buffer.transitions
    folder = checkpoint.Folder(run.checkpoints, step, config.steps)
    try:
        folder.open()
        _write(folder.temporary, config, learner, pretrained, records)
        folder.finish()
    except (OSError, SafetensorError) as error:
        failure = folder.failure(error)
        folder.remove()
        raise failure from error
    checkpoint.prune(run.checkpoints, config.checkpoint.keep_last, config.checkpoint.keep_every)
    log.info("saved %s", folder.final)
    return folder.final


def _write(folder: Path, config: TrainConfig, learner: Learner, pretrained: Pretrained, records: int) -> None:
    policy = learner.policy
    save_pretrained(
        folder / PRETRAINED,
        policy.config,
        unique_state(policy),
        pretrained.preprocessor,
        pretrained.postprocessor,
    )
    algorithm, state = folder / ALGORITHM, folder / TRAINING_STATE
    algorithm.mkdir()
    save_file(_on_host(learner.algorithm.state_dict()), algorithm / WEIGHTS)
    (algorithm / "config.json").write_text(json.dumps(_algorithm_config(learner), indent=2))
    for part, optimizer in learner.algorithm.optimizers.items():
        (state / part).mkdir()
        saved = optimizer.state_dict()
        tensors = {f"state/{i}/{k}": v for i, values in saved["state"].items() for k, v in values.items()}
        save_file(_on_host(tensors), state / part / OPTIMIZER_STATE)
        (state / part / PARAM_GROUPS).write_text(json.dumps(saved["param_groups"], indent=2))
    steps = {"step": learner.updates, "interaction_step": learner.buffer.transitions, "records": records}
    (state / "training_step.json").write_text(json.dumps(steps, indent=2))
    (state / "flexor.json").write_text(json.dumps({"config": config.to_saved()}, indent=2))


def _algorithm_config(learner: Learner) -> dict[str, Any]:
    """As LeRobot writes it: with its names, and with the values that were used."""
    values = {key: value for key, value in learner.algorithm.settings.items() if key != "preset"}
    network = values.pop("critic_network_kwargs")
    return {"type": "sac", **values, "critic_network_kwargs": to_plain(network), "use_torch_compile": False}


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def load_checkpoint(folder: Path, learner: Learner) -> int:
    """Load what `save_checkpoint` saved. How many records of the run it had learned from."""
    checkpoint.verify(folder)
    try:
        load_weights(learner.policy, folder / PRETRAINED)
        algorithm = learner.algorithm
        algorithm.load_state_dict(load_file(folder / ALGORITHM / WEIGHTS))
        for part, optimizer in algorithm.optimizers.items():
            _load_optimizer(folder / TRAINING_STATE / part, optimizer)
        steps = checkpoint.read_state(folder, "training_step.json")
        learner.updates = int(steps["step"])
        return int(steps["records"])
    except (*MALFORMED, OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"Can't resume from {folder}: {error!r}") from error


def _load_optimizer(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in load_file(folder / OPTIMIZER_STATE).items():
        _, number, key = name.split("/")
        state.setdefault(int(number), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
