"""Learning-rate schedules: the kinds and formulas that LeRobot offers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR

from flexor.config.optimizer import HALF_A_WAVE
from flexor.config.schema import SchedulerConfig


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
