"""Learning-rate schedules: their formulas by hand, settings without effect rejected."""

import math
from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn

from flexor.config.optimizer import resolve_scheduler
from flexor.config.schedules import SCHEDULES, build_scheduler, schedule
from flexor.config.schema import SchedulerConfig
from flexor.core.errors import ConfigError
from flexor.policies.act.config import ACTConfig
from flexor.policies.diffusion.config import DiffusionConfig


def factors(steps: int, count: int, **settings) -> list[float]:
    factor = schedule(SchedulerConfig(**settings), steps)
    return [factor(step) for step in range(count)]


def test_constant():
    assert factors(10, 4, type="constant") == [1, 1, 1, 1]


def test_constant_with_warmup():
    assert factors(10, 6, type="constant_with_warmup", num_warmup_steps=4) == [0, 0.25, 0.5, 0.75, 1, 1]


def test_cosine():
    result = factors(10, 11, type="cosine", num_warmup_steps=2)
    assert result[:3] == [0, 0.5, 1]
    assert result[6] == pytest.approx(0.5)  # half way between 2 and 10
    assert result[4] == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert result[10] == pytest.approx(0)


def test_vqbet_is_constant_for_the_vocabulary_and_then_as_lerobot_has_it():
    common = {"type": "vqbet", "num_warmup_steps": 2, "num_vqvae_training_steps": 5}
    result = factors(12, 13, **common)
    assert result[:8] == [1, 1, 1, 1, 1, 0, 0.5, 1]
    assert result[12] == pytest.approx(0.5)  # half way, for the wave is as long as both phases
    assert result[9] == pytest.approx(0.5 * (1 + math.cos(math.pi * 2 / 10)))
    twice = factors(12, 13, **common, num_cycles=1.0)
    assert twice[:8] == result[:8] and twice[12] == pytest.approx(0)
    resolved = resolve_scheduler(SchedulerConfig(type="vqbet"), ACTConfig())
    assert resolved.num_cycles == 0.5


def test_cosine_decay_with_warmup_as_openpi_has_it():
    common = {"type": "cosine_decay_with_warmup", "num_warmup_steps": 4, "peak_lr": 1e-4, "decay_lr": 1e-5}
    result = factors(100, 61, num_decay_steps=40, **common)
    assert result[:3] == pytest.approx([1 / 5, 1 / 5 + 4 / 5 / 4, 1 / 5 + 4 / 5 / 2])
    assert result[20] == pytest.approx(0.1 + 0.9 * 0.5)  # the cosine counts from step 0
    assert result[40] == result[60] == pytest.approx(0.1)


def test_cosine_decay_shrinks_to_a_shorter_run():
    common = {"type": "cosine_decay_with_warmup", "num_warmup_steps": 4, "peak_lr": 1, "decay_lr": 0}
    result = factors(20, 21, num_decay_steps=40, **common)
    assert result[0] == pytest.approx(1 / 3) and result[2] > 0.97 and result[20] == pytest.approx(0)


def test_schedule_reaches_the_optimizer():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = build_scheduler(
        SchedulerConfig(type="constant_with_warmup", num_warmup_steps=4), optimizer, 10
    )
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [0, 0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize(
    "flags", [{"peak_lr": 1.0}, {"type": "cosine", "decay_lr": 1.0}, {"num_warmup_steps": 3}]
)
def test_option_without_meaning_for_the_schedule(flags):
    with pytest.raises(ConfigError, match=r"scheduler\.\w+ has no effect with"):
        resolve_scheduler(SchedulerConfig(**flags), ACTConfig())


def test_schedule_that_lacks_something():
    with pytest.raises(ConfigError, match=r"scheduler\.num_decay_steps, scheduler\.decay_lr"):
        resolve_scheduler(SchedulerConfig(type="cosine_decay_with_warmup", peak_lr=1.0), ACTConfig())


def test_schedule_of_a_policy_that_is_not_here():
    """A diffusion policy of LeRobot's may name one. Another one can be given."""
    policy = DiffusionConfig(scheduler_name="polynomial", scheduler_warmup_steps=7)
    with pytest.raises(
        ConfigError,
        match=r"does not support the policy's learning-rate schedule 'polynomial'.*--scheduler\.type",
    ):
        resolve_scheduler(SchedulerConfig(), policy)
    cosine = SchedulerConfig(type="cosine", num_warmup_steps=3)
    assert resolve_scheduler(cosine, policy) == cosine
    policy.scheduler_name = "cosine"
    assert resolve_scheduler(SchedulerConfig(type="cosine"), policy).num_warmup_steps == 7


def test_the_setting_names_every_schedule():
    (named,) = (
        get_args(kind) for kind in get_args(get_type_hints(SchedulerConfig)["type"]) if get_args(kind)
    )
    assert {*named} == {*SCHEDULES}
