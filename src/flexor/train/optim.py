"""Optimizers, learning-rate schedules and the moving average of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from flexor.config import OptimizerConfig, SchedulerConfig
from flexor.errors import ConfigError
from flexor.policies.base import Policy, PolicyConfig
from flexor.tensors import local

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
HALF_A_WAVE = 0.5  # cycles of a cosine, from its top to its bottom
CLASSES: dict[str, Any] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def resolve_optimizer(given: OptimizerConfig, policy: PolicyConfig) -> OptimizerConfig:
    """Every setting filled in: what the user gave, else the policy's preset, else the optimizer's default."""
    preset = policy.optimizer_preset()
    kind = given.type or preset["type"]
    filled = {"grad_clip_norm": 10.0, **DEFAULTS[kind]}
    filled |= {name: value for name, value in preset.items() if name in filled} | {"type": kind}
    named = {f.name: getattr(given, f.name) for f in fields(given) if getattr(given, f.name) is not None}
    useless = [n for n in named if n not in filled]
    if useless:
        raise ConfigError(f"optimizer.{useless[0]} has no meaning for optimizer.type={kind}.")
    return OptimizerConfig(**{**filled, **named})


def build_optimizer(
    config: OptimizerConfig,
    policy: Policy,
    lr_factor: float = 1.0,
    make: Callable[..., torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """One parameter group per group of the policy, each with its own settings where it has some.

    `make` is the class to use unless it is the one that the settings name.
    """
    assert config.type is not None
    settings = {name: getattr(config, name) for name in DEFAULTS[config.type]}
    groups = [{"params": g.params, **g.overrides} for g in policy.param_groups() if g.params]
    for group in groups:
        group["lr"] = lr_factor * group.get("lr", settings["lr"])
    return (make or _class(config.type))(groups, **settings)


def _class(kind: str) -> Callable[..., torch.optim.Optimizer]:
    if kind == "adamw_8bit":
        from flexor.train.adamw_8bit import AdamW8bit

        return AdamW8bit
    return partial(CLASSES[kind], fused=True)  # one kernel for all parameters; bitwise reproducible


def resolve_scheduler(given: SchedulerConfig, policy: PolicyConfig) -> SchedulerConfig:
    preset = policy.scheduler_preset()
    kind = given.type or preset["type"]
    if kind not in SCHEDULER_SETTINGS:  # LeRobot's policies can have others
        raise ConfigError(
            f"The policy's schedule {kind!r} is not here: give --scheduler.type, one of "
            f"{', '.join(SCHEDULER_SETTINGS)}."
        )
    if kind != preset["type"]:
        preset = {}
    named = {f.name: getattr(given, f.name) for f in fields(given) if getattr(given, f.name) is not None}
    useless = [n for n in named if n not in SCHEDULER_SETTINGS[kind]]
    if useless:
        raise ConfigError(f"scheduler.{useless[0]} has no meaning for scheduler.type={kind}.")
    config = SchedulerConfig(**{**preset, "type": kind, **named})
    if kind == "vqbet" and config.num_cycles is None:
        config.num_cycles = HALF_A_WAVE
    if kind == "cosine_decay_with_warmup":
        missing = [n for n in ("num_decay_steps", "peak_lr", "decay_lr") if getattr(config, n) is None]
        if missing:
            raise ConfigError(f"scheduler.type={kind} needs scheduler.{', scheduler.'.join(missing)}.")
    return config


def schedule(config: SchedulerConfig, steps: int) -> Callable[[int], float]:
    """step -> factor on the learning rate. The kinds and formulas are those LeRobot offers."""
    warmup = config.num_warmup_steps or 0
    cycles = HALF_A_WAVE if config.num_cycles is None else config.num_cycles

    def warm(step: int) -> float:
        return step / max(1, warmup)

    def constant(step: int) -> float:
        return warm(step) if step < warmup else 1.0

    def cosine(step: int) -> float:
        if step < warmup:
            return warm(step)
        progress = (step - warmup) / max(1, steps - warmup)
        return max(0.0, 0.5 * (1 + math.cos(2 * math.pi * cycles * progress)))

    def after_vocabulary(step: int) -> float:
        first = config.num_vqvae_training_steps or 0
        return 1.0 if step < first else cosine(step - first)

    if config.type == "cosine":
        return cosine
    if config.type == "vqbet":
        return after_vocabulary
    if config.type == "cosine_decay_with_warmup":
        return _cosine_decay(config, steps)
    return constant


def _cosine_decay(config: SchedulerConfig, steps: int) -> Callable[[int], float]:
    """openpi's schedule: linear warm-up, then a cosine counted from step 0; shrunk to fit a shorter run."""
    assert config.num_decay_steps and config.peak_lr and config.decay_lr is not None
    decay = min(config.num_decay_steps, steps)
    warmup = int((config.num_warmup_steps or 0) * decay / config.num_decay_steps)
    lowest = config.decay_lr / config.peak_lr

    def factor(step: int) -> float:
        if step < warmup:
            start = 1 / (warmup + 1)
            return start + (1 - start) * step / warmup
        cosine = 0.5 * (1 + math.cos(math.pi * min(step, decay) / decay))
        return lowest + (1 - lowest) * cosine

    return factor


def build_scheduler(config: SchedulerConfig, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    return LambdaLR(optimizer, schedule(config, steps))


class EMA:
    """An exponential moving average of a model's floating-point state; in float32, or small steps would be lost."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.updates = 0
        self.average = {k: _exact(v.detach()).clone() for k, v in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))  # forget the start quickly
        averages, values = [], []
        state = model.state_dict(keep_vars=True)  # not detached: that takes longer than the rest
        for name, value in state.items():
            if value.is_floating_point():
                averages.append(local(self.average[name]))
                values.append(_exact(local(value)))
            else:
                self.average[name].copy_(value)
        torch._foreach_lerp_(averages, values, 1 - decay)


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
