"""What our optimizer for X-VLA does."""

import torch

from flexor.config.optimizer import resolve_optimizer, resolve_scheduler
from flexor.config.schedules import build_scheduler
from flexor.config.schema import OptimizerConfig, SchedulerConfig
from flexor.policies.base import Policy
from flexor.train.optim.optimizers import build_optimizer
from parity.records import group
from parity.xvla.rates import at_steps


def groups(policy: Policy) -> list:
    return [group(policy, each["params"], each) for each in optimizer_of(policy).param_groups]


def after_step(policy: Policy) -> dict:
    optimizer = optimizer_of(policy)
    schedule = resolve_scheduler(SchedulerConfig(), policy.config)
    return {"rates": at_steps(optimizer, lambda steps: build_scheduler(schedule, optimizer, steps), schedule)}


def optimizer_of(policy: Policy) -> torch.optim.Optimizer:
    return build_optimizer(resolve_optimizer(OptimizerConfig(), policy.config), policy)
