"""Adapters (LoRA) in PEFT's files, without the base policy: they load in LeRobot, and LeRobot's load here.

The folder also holds the policy's settings and its processing, as LeRobot saves them with adapters. The base policy
stays where it is: `adapter_config.json` says where.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flexor.core.errors import CheckpointError
from flexor.core.foreign_files import MALFORMED, read_json_object
from flexor.core.name_ranges import listed
from flexor.core.paths import inside
from flexor.core.run_files import POLICY_CONFIG, WEIGHTS
from flexor.core.tensors import copy_part, is_sharded, local, part
from flexor.policies.adapters import LoraConfig, is_adapter, modules_named

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER = "adapter"  # folder of the adapters beside the merged weights
PREFIX = "base_model.model."  # PEFT's model around the policy
DOWN, UP = ".lora_A", ".lora_B"
# settings of PEFT that turn LoRA into another method
OTHER_KINDS = {
    *("use_dora", "use_qalora", "use_bdlora", "fan_in_fan_out", "lora_bias", "target_parameters"),
    *("trainable_token_indices", "kasa_config", "velora_config", "monteclora_config", "layer_replication"),
}
# initial values that change the weights they are added to
CHANGE_BASE = ("pissa", "olora", "corda", "lora_ga")


def save_adapter(model: Path, weights: Mapping[str, Tensor], config: LoraConfig, base: str | None) -> None:
    """Write the adapters in `weights` beside the merged policy in the folder `model`.

    `base` is the policy they were trained on; without one, nothing is written.
    """
    if base is None:
        return
    folder = model / ADAPTER
    folder.mkdir(parents=True, exist_ok=True)
    tensors = adapter_tensors(weights, config)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(plain, folder / TENSORS, metadata={"format": "pt"})
    described = _settings(_layers(weights), _fully_trained_modules(weights, config), config, base)
    (folder / SETTINGS).write_text(json.dumps(described, indent=2))
    for file in model.glob("policy_*processor*"):
        shutil.copyfile(file, folder / file.name)
    described = json.loads((model / POLICY_CONFIG).read_text())
    described |= {"use_peft": True, "pretrained_path": base}
    (folder / POLICY_CONFIG).write_text(json.dumps(described, indent=4))


def adapter_tensors(weights: Mapping[str, Tensor], config: LoraConfig) -> dict[str, Tensor]:
    """The adapters and the fully trained modules in `weights`, under PEFT's names."""
    tensors = {
        f"{PREFIX}{layer}{kind}.weight": weights[f"{layer}{kind}"]
        for layer in _layers(weights)
        for kind in (DOWN, UP)
    }
    fully_trained = tuple(f"{module}." for module in _fully_trained_modules(weights, config))
    for name, tensor in weights.items():
        if not is_adapter(name) and name.startswith(fully_trained):
            tensors[f"{PREFIX}{name}"] = tensor
    return tensors


def _layers(weights: Mapping[str, Tensor]) -> list[str]:
    """The layers that have adapters."""
    return sorted(name.removesuffix(UP) for name in weights if name.endswith(UP))


def _settings(layers: list[str], fully_trained: list[str], config: LoraConfig, base: str) -> dict[str, Any]:
    """PEFT's settings. Layers are listed by name: the meaning of all-linear depends on the program."""
    source, _, revision = base.partition("@") if not Path(base).exists() else (base, "", "")
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": source,
        "revision": revision or None,
        "r": config.r,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": layers,
        "modules_to_save": fully_trained or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "task_type": None,
        "use_dora": False,
        "use_rslora": False,
    }


def _fully_trained_modules(weights: Mapping[str, Tensor], config: LoraConfig) -> list[str]:
    """The modules that are trained fully, found by the names of weights."""
    if not config.full_training_modules:
        return []
    modules: dict[str, None] = {}
    for name in weights:
        parts = name.split(".")
        modules |= dict.fromkeys(".".join(parts[:n]) for n in range(1, len(parts)))
    return list(modules_named(modules, config.full_training_modules, "lora.full_training_modules"))


def base_of(folder: Path) -> str | None:
    """The base policy of the adapters in a folder; None if the folder has the policy's own weights, or no adapters."""
    if (folder / WEIGHTS).is_file() or not (folder / TENSORS).is_file():
        return None
    settings = _read_settings(folder)
    base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not base:
        raise CheckpointError(
            f"{folder / SETTINGS} does not say which policy its adapters were trained on: write its folder or Hub "
            'repository there, as "base_model_name_or_path".'
        )
    return f"{base}@{revision}" if revision and not Path(base).exists() else str(base)


def _read_settings(folder: Path) -> dict[str, Any]:
    try:
        settings = read_json_object(inside(folder, SETTINGS))
        kind = settings["peft_type"]
    except (*MALFORMED, OSError) as error:
        raise CheckpointError(f"{folder / SETTINGS} can't be read: {error!r}") from error
    odd = [name for name, value in settings.items() if value and name in OTHER_KINDS]
    start = settings.get("init_lora_weights")
    odd += [start] if isinstance(start, str) and start.startswith(CHANGE_BASE) else []
    if kind != "LORA" or odd:
        raise CheckpointError(
            f"{folder} holds adapters of the type {', '.join([kind, *odd])}, but Flexor reads plain LoRA only. Merge "
            "them into the policy with PEFT's merge_and_unload(), and load the merged policy."
        )
    return settings


@torch.no_grad()
def merge_adapter(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Add the adapters in a folder to a policy's weights, of which each rank may have a part."""
    settings = _read_settings(folder)
    try:
        saved = {
            name.removeprefix(PREFIX): tensor for name, tensor in load_file(inside(folder, TENSORS)).items()
        }
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"Can't read the adapters in {folder / TENSORS}: {error}") from error
    layers = {name.removesuffix(f"{UP}.weight") for name in saved if name.endswith(f"{UP}.weight")}
    adapter_names = {f"{layer}{kind}.weight" for layer in layers for kind in (DOWN, UP)}
    fully_trained = {name: tensor for name, tensor in saved.items() if name not in adapter_names}
    foreign = [name for name in fully_trained if name not in weights]
    foreign += [
        name
        for name in adapter_names
        if name not in saved or name.rpartition(".lora_")[0] + ".weight" not in weights
    ]
    if foreign:
        raise CheckpointError(
            f"{folder / TENSORS} does not fit this policy: the adapters belong to another one, or to layers that are "
            f"not linear: {listed(foreign)}."
        )
    shapes = {name: tensor.shape for name, tensor in fully_trained.items()}
    for layer in layers:
        down, up = (saved[f"{layer}{kind}.weight"] for kind in (DOWN, UP))
        shapes[f"{layer}.weight"] = torch.Size((len(up), down.shape[1]))
    _check_shapes(folder, shapes, weights)
    for name, tensor in fully_trained.items():
        copy_part(weights[name], tensor)
    for layer in layers:
        down, up = (saved[f"{layer}{kind}.weight"].float() for kind in (DOWN, UP))
        added = _scale(settings, layer, len(down)) * (up @ down)
        target = weights[f"{layer}.weight"]
        target_shard = local(target)
        target_shard.copy_(
            target_shard.float()
            + (added[part(target)] if is_sharded(target) else added).to(target_shard.device)
        )


def _check_shapes(folder: Path, shapes: Mapping[str, torch.Size], weights: Mapping[str, Tensor]) -> None:
    wrong = [name for name, shape in shapes.items() if shape != weights[name].shape]
    if wrong:
        differences = "; ".join(
            f"{name} is {list(shapes[name])}, but {list(weights[name].shape)} in the policy"
            for name in sorted(wrong)
        )
        raise CheckpointError(f"{folder / TENSORS}: {differences}.")


def _scale(settings: Mapping[str, Any], layer: str, rank: int) -> float:
    """The scale of a layer's adapter. In PEFT, layers may have different ranks and alphas."""
    alpha = float(settings.get("lora_alpha", 8))
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            alpha = float(value)
            break
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
