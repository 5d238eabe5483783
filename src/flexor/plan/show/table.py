"""A hardware guide for all policies: their memory and suitable GPUs, from a plan of each policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from flexor.config.schema import TrainConfig
from flexor.core.console import Progress
from flexor.data.settings import CacheConfig, DatasetConfig
from flexor.plan.data import FRAMES
from flexor.plan.data.imagined_robot import Robot, imagined_data, usual_robot
from flexor.plan.plan import Plan, make_plan, site_of
from flexor.plan.rank import Choice, Ranking, cheapest, fastest
from flexor.plan.show.report import duration, gb, precision_of
from flexor.plan.site.hardware import GPU, Hardware
from flexor.plan.speed.speeds import assumed
from flexor.plan.trace.traces import Traces
from flexor.policies import POLICIES, policy_class

BATCH, EPOCHS = 8, 5
REFERENCE = "RTX 4090"  # its memory is shown; other GPUs differ in CUDA context and attention kernels
SEVERAL = (("RTX 4090", 4), ("H200", 8))  # GPUs of one machine
PRECISIONS: tuple[Literal["no", "bf16"], ...] = ("no", "bf16")

HEAD = f"""# Hardware

Which GPU for which policy. `flexor plan --table` generates this page. Every row is a plan of the policy with its
default settings, batch size {BATCH}, a state and actions of {Robot().state} values, and the cameras shown. Times are
for {EPOCHS} epochs of {FRAMES:,} frames on one GPU. [Plan](plan.md) explains how accurate they are, and how to plan
your own run. A policy whose image encoder is frozen by default [encodes each image
once](loading.md#images-encoded-once).

"""

FOOT = f"""
The last columns are for machines with several GPUs, connected by PCIe (RTX 4090) and by NVLink (H200): how much of the
work of one GPU alone each of them does, with a batch of {BATCH} per GPU. The speed of these links was not measured:
see [many GPUs](multi_gpu.md#speed-on-several-gpus).

*Memory* is the peak memory on one {REFERENCE}. *To buy* is the card with the lowest price on which the run fits.
*To rent* is the GPU with the lowest price for the whole run. *Fastest* is the single GPU with the shortest run; if
several are equally fast, the cheapest of them. A policy with one row computes in bf16 with any precision: that is the
type of its weights. GPUs without bf16 and GPUs that share the host's memory are left out.
Prices come from `src/flexor/plan/site/gpus.toml`; each has a date.
"""


@dataclass(frozen=True)
class Row:
    """One policy in one precision."""

    kind: str
    robot: Robot
    plan: Plan
    buy: Choice | None
    rent: Choice | None
    fast: Choice | None
    several: list[float | None]
    """Of each machine with several GPUs: the work of each, relative to one GPU alone; None if it does not fit."""


def hardware_guide(
    hardware: Hardware,
    kinds: Sequence[str] = tuple(POLICIES),
    gpus: Sequence[GPU] = (),
    progress: Progress | None = None,
) -> str:
    """The page; with `gpus`, only these are compared."""
    made = []
    for done, kind in enumerate(kinds, 1):
        made += [*rows(kind, hardware, gpus)]
        if progress is not None:
            progress(done, len(kinds))
    lines = [
        "| Policy | Cameras | Precision | Parameters | Memory, GB | To buy | To rent | Fastest | "
        f"{' | '.join(f'{count} x {name}' for name, count in SEVERAL)} |",
        f"| --- | --- | --- | --- | --- | --- | --- | --- {'| --- ' * len(SEVERAL)}|",
        *(_line(row, hardware) for row in made),
    ]
    return HEAD + "\n".join(lines) + "\n" + FOOT


def rows(kind: str, hardware: Hardware, gpus: Sequence[GPU] = ()) -> Iterator[Row]:
    """One in each precision; one in all if the policy computes in its own type, which no precision changes."""
    robot, policy = usual_robot(policy_class(kind).Config())
    before: Row | None = None
    for precision in PRECISIONS:
        dataset = DatasetConfig(cache=CacheConfig(tier="disk"))
        config = TrainConfig(
            dataset=dataset, policy=policy, epochs=EPOCHS, batch_size=BATCH, precision=precision
        )
        row = _row(kind, robot, config, hardware, gpus)
        if before is not None and _need(before) != _need(row):
            yield before
        before = row
    assert before is not None
    yield before


def _need(row: Row) -> tuple[int, float]:
    return row.plan.peak, row.plan.run_time.step.seconds


def _row(kind: str, robot: Robot, config: TrainConfig, hardware: Hardware, gpus: Sequence[GPU]) -> Row:
    data, traces, speeds = imagined_data(config.policy, FRAMES), Traces(config), assumed()
    site = site_of(hardware, hardware.find(REFERENCE))
    plan = make_plan(config, data, site, hardware, traces=traces, speeds=speeds, search=False)
    ranking = Ranking(
        replace(config, global_batch_size=BATCH), data, hardware, speeds, traces=traces, calibrated=False
    )
    compared = gpus or [gpu for gpu in hardware.gpus.values() if not gpu.unified and "bf16" in gpu.tflops]
    fitting = [c for c in ranking.choices(compared, (1,)) if c.split and c.split.accumulation == 1]
    for_sale = [choice for choice in fitting if choice.gpu.name in hardware.purchases]
    bought = min(for_sale, key=lambda choice: hardware.purchases[choice.gpu.name].usd, default=None)

    def efficiency(name: str, count: int) -> float | None:
        sites = [site_of(hardware, hardware.find(name), each) for each in (1, count)]
        alone, together = (
            make_plan(config, data, site, hardware, traces=traces, speeds=speeds, search=False)
            for site in sites
        )
        if not (alone.fits and together.fits):
            return None
        return alone.run_time.step.seconds / together.run_time.step.seconds

    several = [efficiency(name, count) for name, count in SEVERAL]
    return Row(kind, robot, plan, bought, cheapest(fitting), fastest(fitting), several)


def _line(row: Row, hardware: Hardware) -> str:
    plan, robot = row.plan, row.robot
    buy = "-"
    if row.buy:
        buy = f"{row.buy.gpu.name} ({hardware.purchases[row.buy.gpu.name].usd:,.0f} USD): {_time(row.buy)}"
    rent = f"{row.rent.gpu.name}: {_time(row.rent)}, {row.rent.usd:.2f} USD" if row.rent else "-"
    cells = [
        row.kind,
        f"{robot.cameras} of {robot.height}x{robot.width}",
        precision_of(plan),
        f"{plan.parameters / 1e6:.1f} M",
        gb(plan.peak),
        buy,
        rent,
        f"{row.fast.gpu.name}: {_time(row.fast)}" if row.fast else "-",
        *("-" if each is None else f"{each:.0%}" for each in row.several),
    ]
    return f"| {' | '.join(cells)} |"


def _time(choice: Choice) -> str:
    return duration(choice.hours * 3600)
