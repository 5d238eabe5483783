"""Fills in the optimizer's and scheduler's settings: the user's values, else the policy's preset, else defaults."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from flexor.config.schema import OptimizerConfig, SchedulerConfig
from flexor.core.errors import ConfigError
from flexor.policies.base import PolicyConfig

DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "weight_decay": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8},
    "adam": {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8},
    "sgd": {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.0},
}
DEFAULTS["adamw_8bit"] = DEFAULTS["adamw"]
SCHEDULER_SETTINGS = {
    "constant": {"type"},
    "constant_with_warmup": {"type", "num_warmup_steps"},
    "cosine": {"type", "num_warmup_steps"},
    "cosine_decay_with_warmup": {"type", "num_warmup_steps", "num_decay_steps", "peak_lr", "decay_lr"},
    "vqbet": {"type", "num_warmup_steps", "num_vqvae_training_steps", "num_cycles"},
}
HALF_A_WAVE = 0.5  # cosine cycles: from its maximum to its minimum


def resolve_optimizer(given: OptimizerConfig, policy: PolicyConfig) -> OptimizerConfig:
    """All settings filled in: the user's value, else the policy's preset, else the optimizer's default."""
    preset = policy.optimizer_preset()
    kind = given.type or preset["type"]
    filled = {"grad_clip_norm": 10.0, **DEFAULTS[kind]}
    filled |= {name: value for name, value in preset.items() if name in filled} | {"type": kind}
    named = {f.name: getattr(given, f.name) for f in fields(given) if getattr(given, f.name) is not None}
    useless = [n for n in named if n not in filled]
    if useless:
        raise ConfigError(f"optimizer.{useless[0]} has no effect with optimizer.type={kind}: remove it.")
    return OptimizerConfig(**{**filled, **named})


def resolve_scheduler(given: SchedulerConfig, policy: PolicyConfig) -> SchedulerConfig:
    preset = policy.scheduler_preset()
    kind = given.type or preset["type"]
    if kind not in SCHEDULER_SETTINGS:  # LeRobot's policies can have others
        raise ConfigError(
            f"Flexor does not support the policy's learning-rate schedule {kind!r}. Set --scheduler.type to one of "
            f"{', '.join(SCHEDULER_SETTINGS)}."
        )
    if kind != preset["type"]:
        preset = {}
    named = {f.name: getattr(given, f.name) for f in fields(given) if getattr(given, f.name) is not None}
    useless = [n for n in named if n not in SCHEDULER_SETTINGS[kind]]
    if useless:
        raise ConfigError(f"scheduler.{useless[0]} has no effect with scheduler.type={kind}: remove it.")
    config = SchedulerConfig(**{**preset, "type": kind, **named})
    if kind == "vqbet" and config.num_cycles is None:
        config.num_cycles = HALF_A_WAVE
    if kind == "cosine_decay_with_warmup":
        missing = [n for n in ("num_decay_steps", "peak_lr", "decay_lr") if getattr(config, n) is None]
        if missing:
            raise ConfigError(f"scheduler.type={kind} needs scheduler.{', scheduler.'.join(missing)}.")
    return config
