"""Everything that `flexor plan` shows: a detailed plan, the same job on other GPUs, and suggested changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flexor.config.schema import TrainConfig
from flexor.core.errors import ConfigError
from flexor.core.machine import free_memory, usable_cores
from flexor.plan.advise import Change, advise
from flexor.plan.data.host import Data, Speed
from flexor.plan.plan import FPS, WORKSTATION, Host, Plan, make_plan, site_of
from flexor.plan.rank import COUNTS, Choice, Ranking, cheapest
from flexor.plan.site.hardware import GPU, Hardware
from flexor.plan.speed.speeds import assumed as assumed_speeds
from flexor.plan.speed.time import step_time
from flexor.plan.trace.features import reads_features
from flexor.plan.trace.traces import Traces


@dataclass(frozen=True)
class Comparison:
    plan: Plan
    alone_s: float
    """A step with the same batch per GPU, if there were only one GPU."""
    choices: list[Choice]
    """All compared GPUs and numbers of GPUs, the cheapest first."""
    changes: list[Change]
    """Suggested changes, the least harmful first; empty if the run fits."""
    remedy: list[Change]
    """The least harmful changes that together are sufficient."""
    assumed: str
    """What was assumed about the data; empty if there is a dataset."""
    hardware: Hardware
    traces: Traces


def study(
    config: TrainConfig,
    data: Data,
    hardware: Hardware,
    gpus: Sequence[GPU] = (),
    *,
    here: bool = False,
    count: int | None = None,
    nodes: int = 1,
    interconnect: str | None = None,
    network: str | None = None,
    price: float | None = None,
    speed: Speed | None = None,
    rate_hz: float = FPS,
    executed: int | None = None,
    assumed: str = "",
) -> Comparison:
    """Plan a job, compare GPUs and suggest changes.

    Without `gpus`, all are compared, and the cheapest that fits is planned in detail.
    """
    traces, speeds = Traces(config), assumed_speeds()
    host = Host(usable_cores(), free_memory(), WORKSTATION.disk, "this machine") if here else None

    def plan_on(gpu: GPU, count: int) -> Plan:
        site = site_of(hardware, gpu, count, nodes, interconnect, network, price=price, host=host)
        return make_plan(
            config, data, site, hardware, traces=traces, speed=speed, rate_hz=rate_hz, executed=executed
        )

    def rank(global_batch: int) -> list[Choice]:
        job = replace(config, global_batch_size=global_batch)
        ranking = Ranking(job, data, hardware, speeds, traces=traces, speed=speed)
        compared = hardware.gpus.values() if here or not gpus else gpus
        return ranking.choices(compared, COUNTS if count is None else (count,))

    if gpus:
        plan = plan_on(gpus[0], count or 1)
        choices = rank(plan.split.global_batch)
    else:
        batch = config.global_batch_size or config.batch_size * (config.gradient_accumulation_steps or 1)
        choices = rank(batch * (count or 1) if config.global_batch_size is None else batch)
        best = cheapest(choices) or next(iter(choices), None)
        if best is None:
            raise ConfigError(f"No known GPU supports a global batch size of {batch} on {count or 1} GPUs.")
        plan = plan_on(best.gpu, best.gpus if count is None else count)
    changes, remedy = advise(plan, hardware, config, traces) if not plan.fits else ([], [])
    return Comparison(plan, alone(plan, traces), choices, changes, remedy, assumed, hardware, traces)


def alone(plan: Plan, traces: Traces) -> float:
    """Seconds of a step with the same batch per GPU on one GPU, without the others."""
    if plan.site.world_size == 1:
        return plan.run_time.step.seconds
    gpu, split = plan.site.gpu, plan.split
    features = reads_features(plan.config)
    trace = traces.at(split.batch_size, split.accumulation, gpu, features=features)
    return step_time(trace, gpu, config=plan.config).seconds
