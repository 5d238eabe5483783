"""Learning rates of each group over a run. Imported by both programs."""

from collections.abc import Callable
from typing import Any

import torch


def at_steps(optimizer: torch.optim.Optimizer, build: Callable[[int], Any], schedule: Any) -> list:
    """Of all groups at the steps 0 and 1, at the end of the warm-up and at the end of the decay.

    `schedule` has num_warmup_steps and num_decay_steps.
    """
    names = [group.get("name") for group in optimizer.param_groups]
    scheduler = build(schedule.num_decay_steps)
    asked = (0, 1, schedule.num_warmup_steps, schedule.num_decay_steps)
    bases = [group["initial_lr"] for group in optimizer.param_groups]
    rates = [
        [base * factor(step) for step in asked]
        for base, factor in zip(bases, scheduler.lr_lambdas, strict=True)
    ]
    return [[name, *numbers] for name, numbers in zip(names, rates, strict=True)]
