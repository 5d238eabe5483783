"""`flexor export`: the policy of a checkpoint as one `model.safetensors`, also if many ranks saved it in parts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from flexor.errors import CheckpointError, ConfigError
from flexor.policies import policy_class
from flexor.policies.pretrained import FOLDER, WEIGHTS, read_config
from flexor.train import checkpoint
from flexor.train.saved import STATE, open_tensors


def export(path: Path, output: Path | None = None) -> Path:
    """The `pretrained_model` folder of a run's newest checkpoint, or of the one named, complete with its weights.

    `output` is a new folder for it; unless given, the weights are put into the checkpoint itself.
    """
    found = _find(path)
    checkpoint.verify(found)
    target = found / FOLDER
    if output is not None:
        if output.exists():
            raise ConfigError(f"{output} exists: choose a new folder, so that nothing is lost.")
        shutil.copytree(target, output, ignore=shutil.ignore_patterns(WEIGHTS))
        target = output
    if not (target / WEIGHTS).is_file():
        _write_weights(found, target)
    return target


def _find(path: Path) -> Path:
    if (path / checkpoint.MANIFEST).is_file():
        return path
    newest = checkpoint.newest(path / "checkpoints")
    if newest is None:
        raise CheckpointError(f"{path} is neither a run with checkpoints nor one of its checkpoints.")
    return newest


def _write_weights(found: Path, target: Path) -> None:
    """The moving average if there is one, in the policy's own precision; read without any other rank."""
    config = read_config(str(found / FOLDER))
    weights = policy_class(config.type)(config).state_dict()
    averaged = json.loads((found / STATE / "flexor.json").read_text())["ema_updates"] is not None
    kind = "ema" if averaged else "model"
    open_tensors(found).fill({f"{kind}.{name}": tensor for name, tensor in weights.items()})
    aside = target / f".{WEIGHTS}"
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, aside)
    aside.rename(target / WEIGHTS)
