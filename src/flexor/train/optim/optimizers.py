"""Optimizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flexor.config.optimizer import DEFAULTS
from flexor.config.schema import OptimizerConfig
from flexor.policies.base import ParamGroup, Policy
from flexor.train.optim.adamw_8bit import AdamW8bit
from flexor.train.optim.sgd import SGD

CLASSES: dict[str, Any] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": SGD}


def build_optimizer(config: OptimizerConfig, policy: Policy, lr_factor: float = 1.0) -> torch.optim.Optimizer:
    """One parameter group per group of the policy, each with the settings it overrides."""
    assert config.type is not None
    settings: dict[str, Any] = {name: getattr(config, name) for name in DEFAULTS[config.type]}
    groups = [_settings_of(group, settings) for group in policy.param_groups() if group.params]
    for group in groups:
        group["lr"] = lr_factor * group.get("lr", settings["lr"])
    if config.type == "sgd":
        settings["dampening"] = 0.0  # torch's default is an integer, which LeRobot's resume refuses
    return _class(config.type, policy)(groups, **settings)


def _settings_of(group: ParamGroup, settings: dict[str, Any]) -> dict[str, Any]:
    """A group as torch's optimizers take it."""
    multiplied = {key: factor * settings[key] for key, factor in group.factors.items() if key in settings}
    name = {} if group.name is None else {"name": group.name}
    return {"params": group.params, **multiplied, **group.overrides, **name}


def _class(kind: str, policy: Policy) -> Callable[..., torch.optim.Optimizer]:
    if kind == "adamw_8bit":
        return AdamW8bit
    if kind == "sgd" and any(
        p.dtype == torch.bfloat16 and p.device.type == "cpu" for p in policy.parameters()
    ):
        return SGD  # torch's fused kernel for CPUs leaves most bfloat16 weights as they are
    return partial(CLASSES[kind], fused=True)  # one kernel for all parameters; bitwise reproducible
