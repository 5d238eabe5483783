"""`flexor export`: the policy of a checkpoint as one `model.safetensors`, even if several ranks saved it in shards."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import save_file

from flexor.core.errors import CheckpointError, ConfigError
from flexor.core.output_paths import check_output_folder
from flexor.core.paths import files_to_push
from flexor.core.run_files import PRETRAINED, SHARDS, TRAINING_STATE, WEIGHTS, find_last
from flexor.core.typed import from_plain
from flexor.core.weight_files import WeightFiles
from flexor.policies import policy_class
from flexor.policies.adapter_files import save_adapter
from flexor.policies.adapters import LoraConfig, merged
from flexor.policies.external import is_code, is_loaded
from flexor.policies.pretrained import base_policy, save_weights
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.checkpoint.tensors import ShardedTensors


def export(path: Path, output: Path | None = None) -> Path:
    """The `pretrained_model` folder, with weights, of a checkpoint or of a run's newest checkpoint.

    `output` is a new folder for it. By default the weights are written into the checkpoint itself.
    """
    source = find_checkpoint(path)
    checkpoint.verify(source)
    target = source / PRETRAINED
    files_to_push(target, hidden=True)  # refuses links: weights would be written into what they lead to
    if output is not None:
        check_output_folder(output, "--output")
        if output.exists():
            raise ConfigError(f"{output} already exists: choose a new folder, so nothing is overwritten.")
        shutil.copytree(target, output)
        target = output
    if not (target / WEIGHTS).is_file():
        check_output_folder(target, "--output")
        _write_weights(source, target)
    temporary = target / f".{WEIGHTS}"
    if output is not None and write_weights_to_act(source, target, temporary):
        temporary.rename(target / WEIGHTS)
    return target


def write_weights_to_act(checkpoint_folder: Path, policy_folder: Path, file: Path) -> bool:
    """Write the weights of a checkpoint's policy to `file` in the types that they have when it acts.

    False, and no file: they have them already. A checkpoint keeps those that training needs.
    """
    settings = dict(checkpoint.read_state(checkpoint_folder, "flexor.json")["config"]["policy"])
    kind = str(settings.pop("type"))
    if is_code(kind) and not is_loaded(kind):
        return False
    config, weights = from_plain(policy_class(kind).Config, settings, "policy"), WeightFiles(policy_folder)
    stored = {name: tensor.dtype for name, tensor in weights.described().items()}
    acting = stored | config.acting_dtypes(stored)
    if acting == stored:
        return False
    save_file({name: weights.read(name).to(dtype) for name, dtype in acting.items()}, file)
    return True


def find_checkpoint(path: Path) -> Path:
    path = find_last(path)
    if (path / checkpoint.MANIFEST).is_file():
        return path.resolve() if path.is_symlink() else path
    newest = checkpoint.newest(path / "checkpoints")
    if newest is None:
        raise CheckpointError(f"{path} is neither a run folder with checkpoints nor a checkpoint.")
    return newest


def _write_weights(source: Path, target: Path) -> None:
    """Write the moving average (EMA) if there is one, with adapters merged. One process reads all shards."""
    run = checkpoint.read_state(source, "flexor.json")
    kind = "model." if run["ema_updates"] is None else "ema."
    weights = ShardedTensors(source / TRAINING_STATE / SHARDS).read(kind)
    lora = from_plain(LoraConfig, run["config"].get("lora", {}))
    if lora.r:
        save_adapter(target, weights, lora, base_policy(run["config"].get("policy_path")))
        weights = merged(weights, lora)
    temporary = target / f".{WEIGHTS}"
    save_weights(run["config"]["policy"]["type"], weights, temporary)
    if target == source / PRETRAINED:
        checkpoint.add_exported(source, f"{PRETRAINED}/{WEIGHTS}", temporary)
    temporary.rename(target / WEIGHTS)
