"""Learning-rate schedules, with LeRobot's formulas. To add one: a function, and a line in SCHEDULES."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch.optim.lr_scheduler import LambdaLR

from flexor.config.schema import SchedulerConfig
from flexor.policies.vqbet.schedule import after_vocabulary

HALF_A_WAVE = 0.5  # cycles of a cosine, from its top to its bottom
Factor = Callable[[int], float]  # step -> factor on the learning rate


def constant(config: SchedulerConfig, steps: int) -> Factor:
    warmup = config.num_warmup_steps or 0
    return lambda step: _warm_up(step, warmup) if step < warmup else 1.0


def cosine(config: SchedulerConfig, steps: int) -> Factor:
    warmup = config.num_warmup_steps or 0
    cycles = HALF_A_WAVE if config.num_cycles is None else config.num_cycles

    def factor(step: int) -> float:
        if step < warmup:
            return _warm_up(step, warmup)
        progress = (step - warmup) / max(1, steps - warmup)
        return max(0.0, 0.5 * (1 + math.cos(2 * math.pi * cycles * progress)))

    return factor


def _warm_up(step: int, warmup: int) -> float:
    return step / max(1, warmup)


def cosine_decay(config: SchedulerConfig, steps: int) -> Factor:
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


def vqbet(config: SchedulerConfig, steps: int) -> Factor:
    return after_vocabulary(config.num_vqvae_training_steps or 0, cosine(config, steps))


@dataclass(frozen=True)
class Schedule:
    """One kind of schedule."""

    factor: Callable[[SchedulerConfig, int], Factor]
    settings: tuple[str, ...] = ()
    """Those of `scheduler.*` that it uses."""
    required: tuple[str, ...] = ()
    """Those that must be given."""
    defaults: Mapping[str, float] = field(default_factory=dict)
    lerobot: Mapping[str, str] | None = None
    """How LeRobot names it in `train_config.json`; None where LeRobot has no scheduler."""
    stretches: bool = False
    """Whether it changes with the number of steps of the run."""


SCHEDULES = {
    "constant": Schedule(constant),
    "constant_with_warmup": Schedule(
        constant, ("num_warmup_steps",), lerobot={"type": "constant_with_warmup"}
    ),
    "cosine": Schedule(
        cosine, ("num_warmup_steps",), lerobot={"type": "diffuser", "name": "cosine"}, stretches=True
    ),
    "cosine_decay_with_warmup": Schedule(
        cosine_decay,
        ("num_warmup_steps", "num_decay_steps", "peak_lr", "decay_lr"),
        required=("num_decay_steps", "peak_lr", "decay_lr"),
        lerobot={"type": "cosine_decay_with_warmup"},
        stretches=True,
    ),
    "vqbet": Schedule(
        vqbet,
        ("num_warmup_steps", "num_vqvae_training_steps", "num_cycles"),
        defaults={"num_cycles": HALF_A_WAVE},
        lerobot={"type": "vqbet"},
        stretches=True,
    ),
}


def schedule(config: SchedulerConfig, steps: int) -> Factor:
    """step -> factor on the learning rate, for a run of so many steps."""
    return SCHEDULES[config.type or "constant"].factor(config, steps)


def build_scheduler(config: SchedulerConfig, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    return LambdaLR(optimizer, schedule(config, steps))
