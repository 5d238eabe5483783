"""A whole plan: its parts agree with each other, with the trainer's own arithmetic and with what was asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexor.config.schema import TrainConfig
from flexor.data.settings import CacheConfig, DatasetConfig
from flexor.plan.advise import advise, applied
from flexor.plan.data.host import Camera, Data, Speed
from flexor.plan.plan import Plan, make_plan, site_of
from flexor.plan.rank import Ranking, cheapest, fastest
from flexor.plan.site.hardware import load_hardware
from flexor.plan.speed.speeds import assumed
from flexor.plan.trace.traces import Traces
from support.plans import settings

pytestmark = pytest.mark.usefixtures("shared_traces")
HARDWARE = load_hardware()
DATA = Data(6000, (Camera(64, 64),))
NAMES = ("RTX 4090", "T4", "A100 80GB")


def plan_on(gpu: str, config: TrainConfig, gpus: int = 1, **more: object) -> Plan:
    site = site_of(HARDWARE, HARDWARE.find(gpu), gpus)
    return make_plan(config, DATA, site, HARDWARE, search=False, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_on("RTX 4090", settings(epochs=3, batch_size=4))


def test_a_plan_adds_up(plan: Plan):
    assert plan.fits and plan.peak == plan.memory.total < plan.site.gpu.memory
    assert plan.config.steps == 3 * 6000 / 4 and plan.epochs == pytest.approx(3)
    assert plan.run_time.seconds >= plan.config.steps * plan.run_time.step.seconds * (1 - 1e-9)
    assert plan.samples_per_s == pytest.approx(3 * 6000 / plan.run_time.seconds)
    assert plan.money.rent == pytest.approx(plan.run_time.hours * plan.site.usd_per_hour, rel=0.1)
    weights, state = 4 * plan.parameters, 8 * plan.trained
    assert plan.checkpoint == pytest.approx(weights + state, rel=0.02)


def test_data_that_comes_slowly_makes_the_run_longer(plan: Plan):
    config = settings(epochs=3, batch_size=4, dataset=DatasetConfig(cache=CacheConfig(tier="stream")))
    slow = plan_on("RTX 4090", config, speed=Speed(decode_s=10.0, gather_s=0.0, reached=1.0))
    assert slow.data_bound and not plan.data_bound
    # four threads, ten seconds for each sample
    assert slow.run_time.seconds == pytest.approx(3 * 6000 * 10 / min(4, slow.site.host.cores - 1))
    assert slow.run_time.busy < plan.run_time.busy


def test_many_gpus_are_what_the_trainer_makes_of_them():
    two = plan_on("A100 80GB", settings(batch_size=4, steps=100), gpus=2)
    assert two.split.global_batch == 8 and two.memory.parallelism.strategy == "ddp"
    assert two.run_time.step.communication > 0 and two.concurrent is None
    fixed = plan_on("A100 80GB", settings(batch_size=4, global_batch_size=4, steps=100), gpus=2)
    assert (fixed.split.batch_size, fixed.split.accumulation) == (2, 1)


def test_a_given_price_counts():
    gpu = HARDWARE.find("RTX 4090")
    config = settings(steps=1000)
    site = site_of(HARDWARE, gpu, price=3.0)
    dear = make_plan(config, DATA, site, HARDWARE, search=False)
    assert dear.money.rent == pytest.approx(3 * dear.run_time.hours, abs=0.001)


def test_the_ranking_agrees_with_the_plans():
    config = settings(batch_size=8, global_batch_size=8, steps=1000)
    traces = Traces(config)
    ranking = Ranking(config, DATA, HARDWARE, assumed(), traces=traces, calibrated=False)
    choices = ranking.choices([HARDWARE.find(name) for name in NAMES], (1, 2))
    assert len(choices) == 6 and all(choice.fits for choice in choices)
    costs = [choice.usd for choice in choices if choice.usd is not None]
    assert costs == sorted(costs) and cheapest(choices) is choices[0]
    quickest = fastest(choices)
    assert quickest and quickest.hours <= 1.02 * min(choice.hours for choice in choices)
    for choice in choices:
        plan = plan_on(choice.gpu.name, config, choice.gpus, speeds=assumed())
        assert choice.peak == plan.peak
        assert choice.hours == pytest.approx(plan.run_time.hours)
        assert choice.usd == pytest.approx(plan.money.rent)


def test_what_does_not_fit_at_once_is_dealt_out_in_passes():
    config = settings(size=(256, 256), batch_size=64, global_batch_size=64, steps=1000)
    fitting = plan_on("RTX 4090", config)
    small = replace(HARDWARE.find("RTX 4090"), name="small", memory_gib=0.6 * fitting.peak / 2**30)
    ranking = Ranking(config, DATA, HARDWARE, assumed())
    choice = ranking.choice(small, 1)
    assert choice.split and choice.split.accumulation > 1 and choice.split.global_batch == 64
    assert choice.peak <= small.memory
    tiny = replace(small, memory_gib=0.3)
    assert not ranking.choice(tiny, 1).fits


def test_changes_are_planned_and_their_remedy_fits():
    config = settings(size=(256, 256), batch_size=64, steps=1000)
    fitting = plan_on("RTX 4090", config)
    small = replace(HARDWARE.find("RTX 4090"), memory_gib=0.6 * fitting.peak / 2**30)
    site = site_of(HARDWARE, small)
    traces = Traces(config)
    plan = make_plan(config, DATA, site, HARDWARE, traces=traces)
    assert not plan.fits and plan.largest_batch and plan.largest_batch < 64
    changes, remedy = advise(plan, HARDWARE, config, traces)
    names = {change.name: change for change in changes}
    assert {"accumulation", "precision", "lora", "batch"} <= names.keys()
    assert [change.impact for change in changes] == sorted(change.impact for change in changes)
    assert all(change.effect and change.effect.memory > 0 for change in changes)
    assert [change.name for change in remedy] == ["accumulation"]  # the least harm there is
    flags = dict(word.removeprefix("--").split("=") for change in remedy for word in change.setting.split())
    assert make_plan(applied(config, flags), DATA, site, HARDWARE, search=False).fits


def test_applying_a_change_leaves_the_settings_alone():
    config = settings(batch_size=8)
    changed = applied(config, {"lora.r": "16", "dataset.cache.size": "32x32", "optimizer.type": "adamw_8bit"})
    assert (changed.lora.r, changed.optimizer.type) == (16, "adamw_8bit")
    assert changed.policy.images["observation.images.top"].shape == (3, 32, 32)
    assert config.lora.r == 0 and config.policy.images["observation.images.top"].shape == (3, 64, 64)
