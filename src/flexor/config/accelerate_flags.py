"""Translates an Accelerate config into Flexor settings.

`accelerate launch` passes its flags and its config file to its processes as environment variables. They become
settings of the run; a value that contradicts the run's own settings is an error. Accelerate passes its defaults too,
so a value that is Accelerate's default (mixed_precision: no, no offloading) counts as not given.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexor.config.schema import TrainConfig, group_type
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.typed import coerce, field_types

# FSDP 1's sharding strategies in Accelerate's order (numbered from 1) -> strategy, reshard_after_forward.
SHARDING = {
    "FULL_SHARD": ("fsdp", True),
    "SHARD_GRAD_OP": ("fsdp", False),
    "NO_SHARD": ("ddp", False),
    "HYBRID_SHARD": ("hsdp", True),
    "HYBRID_SHARD_ZERO2": ("hsdp", False),
}


@dataclass(frozen=True)
class AccelerateSetting:
    """One setting of the Accelerate config: how it is written there, and Flexor's value for it."""

    source: str
    value: Any


def started_by_accelerate(env: Mapping[str, str] | None = None) -> bool:
    """Whether `accelerate launch` started this process: it always sets a precision."""
    return "ACCELERATE_MIXED_PRECISION" in (os.environ if env is None else env)


def uses_deepspeed() -> bool:
    return _true(os.environ, "ACCELERATE_USE_DEEPSPEED")


def accelerate_settings(flat: Mapping[str, Any], env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Settings from the Accelerate config that the run's own (`flat`) lack. Contradictions are an error."""
    env = os.environ if env is None else env
    if not started_by_accelerate(env):
        return {}
    _refuse_unsupported(env)
    settings: dict[str, Any] = {}
    for key, setting in _read_settings(env).items():
        value = _typed(key, flat[key]) if key in flat else None
        if value in (None, "auto"):
            settings[key] = setting.value
        elif not _agree(setting.value, value):
            raise ConfigError(
                f"The Accelerate config has {setting.source}, but the run has {key}={value}: "
                "remove one of them, or set both to the same value."
            )
    return settings


def _typed(key: str, value: Any) -> Any:
    group, _, name = key.rpartition(".")
    return coerce(value, field_types(group_type(group) if group else TrainConfig)[name], key)


def _agree(accelerate: Any, value: Any) -> bool:
    return value == accelerate or (accelerate, value) == ("fsdp", "hsdp")  # hsdp is fsdp in groups


def _read_settings(env: Mapping[str, str]) -> dict[str, AccelerateSetting]:
    settings: dict[str, AccelerateSetting] = {}
    if (precision := env["ACCELERATE_MIXED_PRECISION"]) != "no":
        settings["precision"] = AccelerateSetting(f"mixed_precision: {precision}", precision)
    if (steps := env.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")).isdigit():
        settings["gradient_accumulation_steps"] = AccelerateSetting(
            f"gradient_accumulation_steps: {steps}", int(steps)
        )
    if _true(env, "ACCELERATE_USE_CPU"):
        settings["policy.device"] = AccelerateSetting("use_cpu: true", "cpu")
    if _true(env, "ACCELERATE_USE_DEEPSPEED"):
        settings |= _read_deepspeed(env)
    elif _true(env, "ACCELERATE_USE_FSDP"):
        settings |= _read_fsdp(env)
    elif int(env.get("WORLD_SIZE", 1)) > 1:
        settings["parallel.strategy"] = AccelerateSetting(
            "no FSDP, so each process holds the whole model (ddp)", "ddp"
        )
    elif "MASTER_ADDR" in env and "RANK" not in env:
        log.warning(
            "`accelerate launch --cpu --num_processes=N` starts only one process (it expects mpirun to start more), so "
            "this run has one. For N processes use `accelerate launch --multi_gpu --num_processes=N`, which needs no "
            "GPU, or `flexor train --processes=N`."
        )
    return settings


def _read_fsdp(env: Mapping[str, str]) -> dict[str, AccelerateSetting]:
    source = "fsdp_version: 2"
    strategy, reshard = "fsdp", env.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false"
    if env.get("FSDP_VERSION", "1") == "1":
        source = f"fsdp_sharding_strategy: {_sharding(env)}"
        strategy, reshard = SHARDING[_sharding(env)]
        if env.get("RANK", "0") == "0" and strategy != "ddp":
            log.info("%s with fsdp_version: 1: Flexor uses FSDP 2, which shards the same way", source)
    settings = {"parallel.strategy": AccelerateSetting(source, strategy)}
    if strategy == "ddp":
        return settings
    if not reshard:
        settings["parallel.reshard_after_forward"] = AccelerateSetting(
            "sharding that keeps weights gathered after forward", False
        )
    if _true(env, "FSDP_OFFLOAD_PARAMS"):
        settings["parallel.cpu_offload"] = AccelerateSetting("fsdp_offload_params: true", True)
    if _true(env, "FSDP_ACTIVATION_CHECKPOINTING"):
        settings["activation_checkpointing"] = AccelerateSetting("fsdp_activation_checkpointing: true", True)
    copies = int(env.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", 1))
    if copies > 1:
        parts = int(env.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", 1))
        source = f"parallelism_config_dp_replicate_size: {copies}"
        settings |= {
            "parallel.strategy": AccelerateSetting(source, "hsdp"),
            "parallel.dp_replicate": AccelerateSetting(source, copies),
        }
        settings["parallel.dp_shard"] = AccelerateSetting(f"parallelism_config_dp_shard_size: {parts}", parts)
    return settings


def _sharding(env: Mapping[str, str]) -> str:
    """FSDP 1's sharding strategy; newer configs store it under the name of FSDP 2's setting."""
    newer = env.get("FSDP_RESHARD_AFTER_FORWARD", "true")
    value = env.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD") if newer in ("true", "false") else newer
    names = list(SHARDING)
    if value.isdigit() and 0 < int(value) <= len(names):
        return names[int(value) - 1]
    if value.upper() not in SHARDING:
        raise ConfigError(
            f"The Accelerate config has fsdp_sharding_strategy: {value}. Use one of {', '.join(names)}."
        )
    return value.upper()


def deepspeed_settings(env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """DeepSpeed's own settings: from its config file, or the few DeepSpeed settings of an Accelerate config."""
    env = os.environ if env is None else env
    if (file := env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")) != "none":
        try:
            return {"zero_optimization": {}, **json.loads(Path(file).read_text())}
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"deepspeed_config_file: {file} can't be read: {error}") from error
    offload = {
        f"offload_{part}": {"device": device}
        for part in ("optimizer", "param")
        if (device := env.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part.upper()}_DEVICE", "none")) != "none"
    }
    stage = int(env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2))
    settings: dict[str, Any] = {"zero_optimization": {"stage": stage, **offload}}
    if (limit := env.get("ACCELERATE_GRADIENT_CLIPPING", "auto")) != "auto":
        settings["gradient_clipping"] = float(limit)
    return settings


def _read_deepspeed(env: Mapping[str, str]) -> dict[str, AccelerateSetting]:
    config = deepspeed_settings(env)
    zero = config["zero_optimization"]
    if (stage := zero.get("stage", 0)) not in (1, 2):
        instead = "FSDP, which also shards the weights" if stage else "MULTI_GPU, which is equivalent"
        raise ConfigError(
            f"The Accelerate config has zero_stage: {stage}, which Flexor does not support. "
            f"Use distributed_type: {instead}."
        )
    for name in ("offload_optimizer", "offload_param"):
        if zero.get(name, {}).get("device", "none") != "none":
            raise ConfigError(
                f"The Accelerate config has {name}, which Flexor does not support with DeepSpeed. To offload to "
                "the host's memory, use FSDP with fsdp_offload_params: true."
            )
    for name in ("optimizer", "scheduler"):
        if name in config:
            raise ConfigError(
                f"The DeepSpeed config file has a section {name}. Remove it, and set --{name}.* of the run instead."
            )
    settings = {"parallel.strategy": AccelerateSetting(f"zero_stage: {stage}", "ddp")}
    keys = {
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "train_micro_batch_size_per_gpu": "batch_size",
        "train_batch_size": "global_batch_size",
        "gradient_clipping": "optimizer.grad_clip_norm",
    }
    for name, key in keys.items():
        if isinstance(value := config.get(name), int | float):
            settings[key] = AccelerateSetting(f"{name}: {value}", value)
    for precision in ("bf16", "fp16"):
        if config.get(precision, {}).get("enabled") is True:
            settings["precision"] = AccelerateSetting(f"{precision}: enabled", precision)
    return settings


def _refuse_unsupported(env: Mapping[str, str]) -> None:
    """Raise an error for settings that would change the run and that Flexor does not support."""
    unsupported = {
        "distributed_type: MEGATRON_LM": _true(env, "ACCELERATE_USE_MEGATRON_LM"),
        "fsdp_ignored_modules": "FSDP_IGNORED_MODULES" in env,
        "fsdp_activation_checkpointing_offload": _true(env, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"),
    }
    for size in ("TP", "CP", "SP"):
        number = env.get(f"PARALLELISM_CONFIG_{size}_SIZE", "1")
        unsupported[f"parallelism_config_{size.lower()}_size: {number}"] = number != "1"
    for source, is_set in unsupported.items():
        if is_set:
            raise ConfigError(
                f"The Accelerate config has {source}, which Flexor does not support. Flexor trains with DDP, FSDP, "
                "HSDP and ZeRO 1 and 2, in float32, bf16, fp16 and fp8."
            )


def _true(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "false").lower() in ("true", "1", "yes")
