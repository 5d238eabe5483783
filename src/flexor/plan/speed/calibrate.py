"""Measure this machine's GPU and its host for two or three minutes, so that plans for it go by what it does.

The built-in policies train for some steps on made-up batches. A profile of a step says how long each operation took;
those are the samples that other operations are compared with (see `speeds.py`). Steps on tiny pictures, with nothing
for the GPU to do, say what the host needs to issue an operation. They are looked at again and again in between,
because other programs want the host too, and a shared one is twice as fast at times. Whole steps are then predicted
from all that, and how far off that is becomes the uncertainty of every plan.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import date
from typing import Any, NamedTuple

import torch

from flexor.config.schema import TrainConfig
from flexor.plan.data.imagined_robot import Robot
from flexor.plan.memory.memory import MemoryPlanner
from flexor.plan.site.hardware import GPU
from flexor.plan.speed.measure import WARM_UP, Measured
from flexor.plan.speed.speeds import VIEW, Sample, Speeds, sample_of
from flexor.plan.speed.time import step_time, steps_ops
from flexor.plan.trace.events import Trace
from flexor.plan.trace.ops import Op
from flexor.plan.trace.trace import trace_step
from flexor.plan.trace.traces import Traces
from flexor.policies import POLICIES, policy_class
from flexor.policies.base import Calibration

PRECISIONS = ("no", "bf16")
BATCHES = (4, 32)
LEAST = 0.05  # relative error that is stated at least: machines are not the same every day
STEPS = 4  # in each of the windows of time that are looked at
FEW = 4  # steps in which the host is looked at

HOSTS_GIB = 4  # of memory for the policies that the host is measured with


class Check(NamedTuple):
    """A step that was measured as a whole."""

    config: TrainConfig
    trace: Trace
    seconds: float


def calibrations() -> dict[str, Calibration]:
    """The policies that are measured, and on what."""
    found = {kind: policy_class(kind).Config.calibration for kind in POLICIES}
    return {kind: calibration for kind, calibration in found.items() if calibration}


def calibrate(gpu: GPU, say: Callable[[str], None]) -> Speeds:
    """What plans for this GPU and its host should go by."""
    kinds = calibrations()
    samples: list[Sample] = []
    checks: list[Check] = []
    room = replace(gpu, memory_gib=gpu.memory_gib - HOSTS_GIB)
    say("policies for the host")
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(HostMeasurement(kind, precision, gpu))
            for kind in kinds
            for precision in PRECISIONS
        ]
        for kind in kinds:
            for precision in PRECISIONS:
                config = settings(kind, precision)
                planner = MemoryPlanner(config, room, traces=Traces(config, scalable=False))
                for batch in (size for size in BATCHES if planner.fits(size)):
                    say(f"{kind}, {'float32' if precision == 'no' else precision}, batch {batch}")
                    trace = planner.trace(batch)
                    with Measured(config, batch) as run:
                        checks.append(Check(config, trace, run.steps(STEPS)))
                        timed, _ = run.operations(trace)
                    samples += [sample_of(op, seconds, gpu) for op, seconds in timed if seconds > 0]
                for host in hosts:
                    host.look()
    costs = {kind: _mean(host.costs() for host in hosts if host.kind == kind) for kind in kinds}
    costs["any"] = _mean(costs.values())
    speeds = Speeds(gpu.name, torch.__version__, str(date.today()), tuple(merged(samples)), costs)
    return _with_errors(speeds, gpu, checks)


def settings(kind: str, precision: str = "no", robot: Robot | None = None, **changes: Any) -> TrainConfig:
    """A run of a policy with its own defaults, but for some."""
    robot = robot or Robot(*calibrations()[kind][:3])
    policy = robot.fill_in(policy_class(kind).Config(**changes))
    return TrainConfig(policy=policy, precision=precision)  # type: ignore[arg-type]


def merged(samples: Iterable[Sample]) -> list[Sample]:
    """One for each place: the median of what was seen there."""
    seen: dict[tuple[str, str, tuple[float, ...]], list[float]] = defaultdict(list)
    for name, dtype, at, times in samples:
        seen[name, dtype, at].append(times)
    return [Sample(*place, times=round(statistics.median(seen[place]), 3)) for place in sorted(seen)]


class HostMeasurement(Measured):
    """A policy's steps with next to nothing for the GPU to do: what the host takes for each operation."""

    def __init__(self, kind: str, precision: str, gpu: GPU):
        self.kind = kind
        usual = calibrations()[kind]
        tiny = Robot(usual.cameras, min(usual.height, 96), min(usual.width, 96))
        config = settings(kind, precision, tiny, **usual.narrow)
        self.ops = list(steps_ops(trace_step(config, 2, gpu)))
        self.seen: list[dict[str, float]] = []
        super().__init__(config, 2)

    def look(self) -> None:
        self.window(WARM_UP)  # whoever was measured before gave the memory back
        seconds, phases = self.window(FEW), self.host(FEW)
        pace = seconds / sum(phases.values())  # waiting after each step, as `host` does, slows the host down
        self.seen.append({phase: pace * time for phase, time in phases.items()})

    def costs(self) -> dict[str, float]:
        """Seconds for a common operation, by phase of a step."""
        usual = {phase: statistics.median(seen[phase] for seen in self.seen) for phase in self.seen[0]}
        return per_operation(self.ops, usual)


def per_operation(ops: Iterable[Op], seconds: dict[str, float]) -> dict[str, float]:
    """What a common operation costs in each phase; what comes after the optimizer belongs to the step as a whole."""
    units: dict[str, float] = defaultdict(float)
    for op in ops:
        units[op.phase] += VIEW if op.kind == "view" else op.host
    phases = [phase for phase in seconds if phase != "ema"]
    return {"step": seconds.get("ema", 0.0), **{phase: seconds[phase] / units[phase] for phase in phases}}


def _mean(costs: Iterable[dict[str, float]]) -> dict[str, float]:
    seen: dict[str, list[float]] = defaultdict(list)
    for cost in costs:
        for phase, seconds in cost.items():
            seen[phase].append(seconds)
    return {phase: statistics.mean(all_of_it) for phase, all_of_it in seen.items()}


def _with_errors(speeds: Speeds, gpu: GPU, checks: list[Check]) -> Speeds:
    """With how far off the steps are that were measured as a whole."""
    errors: dict[str, list[float]] = {"gpu": [], "host": []}
    for config, trace, seconds in checks:
        planned = step_time(trace, gpu, config=config, speeds=speeds)
        errors["host" if planned.bound == "host" else "gpu"].append(abs(planned.seconds / seconds - 1))
    spreads = {bound: max([LEAST, *some]) for bound, some in errors.items()}
    return replace(speeds, spread_gpu=spreads["gpu"], spread_host=max(spreads["host"], spreads["gpu"]))
