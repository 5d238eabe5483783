"""The optimizer and its schedule, filled in: what the user gave, else what the policy prefers, else defaults."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from flexor.config.schedules import SCHEDULES
from flexor.config.schema import OptimizerConfig, SchedulerConfig
from flexor.core.errors import ConfigError
from flexor.core.typed import check_values
from flexor.policies.base import PolicyConfig

DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "weight_decay": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8},
    "adam": {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8},
    "sgd": {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.0},
}
DEFAULTS["adamw_8bit"] = DEFAULTS["adamw"]


def resolve_optimizer(settings: OptimizerConfig, policy: PolicyConfig) -> OptimizerConfig:
    """Every setting filled in: what the user gave, else the policy's preset, else the optimizer's default."""
    preset = policy.optimizer_preset()
    kind = settings.type or preset["type"]
    filled = {"grad_clip_norm": 10.0, **DEFAULTS[kind]}
    filled |= {name: value for name, value in preset.items() if name in filled} | {"type": kind}
    named = {
        f.name: getattr(settings, f.name) for f in fields(settings) if getattr(settings, f.name) is not None
    }
    useless = [n for n in named if n not in filled]
    if useless:
        raise ConfigError(f"optimizer.{useless[0]} has no effect with optimizer.type={kind}: remove it.")
    config = OptimizerConfig(**{**filled, **named})
    check_values(config, "optimizer")  # also those of the policy
    return config


def resolve_scheduler(settings: SchedulerConfig, policy: PolicyConfig) -> SchedulerConfig:
    preset = policy.scheduler_preset()
    kind = settings.type or preset["type"]
    if kind not in SCHEDULES:  # LeRobot's policies can have others
        raise ConfigError(
            f"Flexor does not support the policy's learning-rate schedule {kind!r}. Set --scheduler.type to one of "
            f"{', '.join(SCHEDULES)}."
        )
    schedule = SCHEDULES[kind]
    if kind != preset["type"]:
        preset = {}
    named = {
        f.name: getattr(settings, f.name) for f in fields(settings) if getattr(settings, f.name) is not None
    }
    useless = [n for n in named if n not in ("type", *schedule.settings)]
    if useless:
        raise ConfigError(f"scheduler.{useless[0]} has no effect with scheduler.type={kind}: remove it.")
    config = SchedulerConfig(**{**schedule.defaults, **preset, "type": kind, **named})
    missing = [n for n in schedule.required if getattr(config, n) is None]
    if missing:
        raise ConfigError(f"scheduler.type={kind} needs scheduler.{', scheduler.'.join(missing)}.")
    check_values(config, "scheduler")
    return config
