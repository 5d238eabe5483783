"""LeRobot's settings of processes, precision and averages, as it has had them since 0.6.1, as Flexor's.

LeRobot writes all of them into `train_config.json`, defaults included. A default there asks for nothing; as a flag it
does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.typed import Text, parse_yaml

NESTED = (
    *("parallelism", "parallelism.context_parallel", "accelerator", "accelerator.gradient_accumulation"),
    *("accelerator.fsdp", "accelerator.ddp", "accelerator.compile", "accelerator.activation_checkpointing"),
)
"""Groups of LeRobot's settings that Flexor does not have."""

TRANSLATED = {
    "parallelism.dp_shard": ("parallel.strategy=fsdp", "unless it is 1; -1: all processes"),
    "parallelism.dp_replicate": ("parallel.strategy=ddp", "with parallelism.dp_shard: hsdp"),
    "accelerator.mixed_precision": ("precision", "no in a file is LeRobot's default, and not taken"),
    "accelerator.gradient_accumulation.steps": (
        "gradient_accumulation_steps",
        "LeRobot counts forward passes as steps, Flexor steps of the optimizer",
    ),
    "accelerator.ddp.find_unused_parameters": (
        "parallel.find_unused_parameters",
        "true in a file is LeRobot's default, and not taken",
    ),
    "accelerator.activation_checkpointing.mode": ("activation_checkpointing=true", "if it is full"),
    "checkpoint_format": ("checkpoint.export=false", "if it is dcp"),
    "ema.max_decay": ("ema.decay", "unless ema.decay is given, which is then constant"),
}
"""What is said of these settings: Flexor's, and when."""

EMA_SCHEDULE = ("update_after_step", "inv_gamma", "power", "min_decay", "max_decay", "use_for_eval")


def with_runtime(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with Flexor's in place of those. Flexor's own count if both are given."""
    result = {key: value for key, value in flat.items() if key not in TRANSLATED}
    values = {key: _plain(value) for key, value in flat.items() if key in TRANSLATED}
    requested = {key for key in values if isinstance(flat[key], Text)}
    translated = _parallel(values) | _steps(values, flat)
    for key, translate in ONE_BY_ONE.items():
        if key in values:
            translated |= translate(values[key], key in requested)
    result = {**translated, **result}
    return _with_average(result, flat)


def _plain(value: Any) -> Any:
    return parse_yaml(value) if isinstance(value, Text) else value


def _process_count(values: Mapping[str, Any], key: str) -> int:
    number = values.get(key, 1)
    if not isinstance(number, int) or (number < 1 and (key, number) != ("parallelism.dp_shard", -1)):
        raise ConfigError(f"{key}={number} is not a number of processes.")
    return number


def _parallel(values: Mapping[str, Any]) -> dict[str, Any]:
    copies, parts = (_process_count(values, f"parallelism.{name}") for name in ("dp_replicate", "dp_shard"))
    if parts == 1:
        return {"parallel.strategy": "ddp"} if copies > 1 else {}
    if copies == 1:
        return {"parallel.strategy": "fsdp"}
    hybrid = {"parallel.strategy": "hsdp", "parallel.dp_replicate": copies}
    return hybrid if parts == -1 else hybrid | {"parallel.dp_shard": parts}


def _steps(values: Mapping[str, Any], flat: Mapping[str, Any]) -> dict[str, Any]:
    key = "accelerator.gradient_accumulation.steps"
    passes = values.get(key, 1)
    if passes == 1 or "gradient_accumulation_steps" in flat:
        return {}
    steps = _plain(flat.get("steps"))
    if isinstance(passes, int) and isinstance(steps, int) and passes > 1:
        log.warning(
            "%s=%d: LeRobot counts forward passes as steps, Flexor steps of the optimizer. LeRobot's %d steps are %d "
            "here: set --steps=%d for as much training",
            *(key, passes, steps, steps // passes, steps // passes),
        )
    return {"gradient_accumulation_steps": passes}


def _precision(value: Any, requested: bool) -> dict[str, Any]:
    precision = "no" if value is False else value  # as YAML reads it
    return {"precision": precision} if requested or precision != "no" else {}


def _unused(value: Any, requested: bool) -> dict[str, Any]:
    return {"parallel.find_unused_parameters": value} if requested else {}


def _recompute(value: Any, requested: bool) -> dict[str, Any]:
    if value not in ("full", "none", None):
        raise ConfigError(f"accelerator.activation_checkpointing.mode={value}: expected none or full.")
    return {"activation_checkpointing": True} if value == "full" else {}


def _format(value: Any, requested: bool) -> dict[str, Any]:
    if value not in ("safetensors", "dcp", "safetensors_dcp"):
        raise ConfigError(f"checkpoint_format={value}: expected safetensors, dcp or safetensors_dcp.")
    return {"checkpoint.export": False} if value == "dcp" else {}


ONE_BY_ONE: dict[str, Callable[[Any, bool], dict[str, Any]]] = {
    "accelerator.mixed_precision": _precision,
    "accelerator.ddp.find_unused_parameters": _unused,
    "accelerator.activation_checkpointing.mode": _recompute,
    "checkpoint_format": _format,
}


def _with_average(result: dict[str, Any], flat: Mapping[str, Any]) -> dict[str, Any]:
    """LeRobot's moving average: its decay rises by a schedule up to a maximum, or is constant."""
    schedule = {name: _plain(flat[f"ema.{name}"]) for name in EMA_SCHEDULE if f"ema.{name}" in flat}
    result = {key: value for key, value in result.items() if key not in ("ema.max_decay", "ema.use_for_eval")}
    decay = _plain(flat.get("ema.decay"))
    if decay is None:
        result.pop("ema.decay", None)
    if str(_plain(flat.get("ema.enable", False))).lower() != "true":
        unused = {f"ema.{name}" for name in EMA_SCHEDULE}
        return {key: value for key, value in result.items() if key not in unused}
    if schedule.get("use_for_eval", True) is not True:
        raise ConfigError("ema.use_for_eval=false is not supported: evaluation uses the average.")
    if "max_decay" not in schedule:  # none of LeRobot's
        return result
    if decay is None:
        return {"ema.decay": schedule["max_decay"], **result}
    constant = {key: value for key, value in result.items() if key not in ("ema.inv_gamma", "ema.power")}
    return constant | {"ema.min_decay": decay}
