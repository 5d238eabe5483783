"""Measure this machine's GPU and its host for about a minute, so that plans for it go by what it does.

The built-in policies train for some steps on made-up batches. A profile of a step says how long each operation took;
those are the samples that other operations are compared with (see `speeds.py`). Steps on tiny pictures, with nothing
for the GPU to do, say what the host needs to issue an operation. Whole steps are then predicted from all that, and how
far off that is becomes the uncertainty of every plan.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import date
from typing import NamedTuple

import torch

from flexor.config import TrainConfig
from flexor.plan.hardware import GPU
from flexor.plan.measure import Measured
from flexor.plan.memory import MemoryPlanner
from flexor.plan.ops import Op
from flexor.plan.robot import Robot
from flexor.plan.speeds import VIEW, Sample, Speeds, sample_of
from flexor.plan.time import step_time, steps_ops
from flexor.plan.trace import Trace, trace_step
from flexor.policies import policy_class

ROBOTS = {
    "act": Robot(),
    "diffusion": Robot(),
    "vqbet": Robot(cameras=1, height=96, width=96),
    "tdmpc": Robot(cameras=1, height=84, width=84),
}
BATCHES = (4, 32)
LEAST = 0.05  # relative error that is stated at least: machines are not the same every day
STEPS = 8


class Check(NamedTuple):
    """A step that was measured as a whole."""

    config: TrainConfig
    trace: Trace
    seconds: float


def calibrate(gpu: GPU, say: Callable[[str], None]) -> Speeds:
    """What plans for this GPU and its host should go by."""
    samples: list[Sample] = []
    host: dict[str, dict[str, float]] = {}
    checks: list[Check] = []
    for kind in ROBOTS:
        for precision in ("no", "bf16"):
            config = settings(kind, precision)
            planner = MemoryPlanner(config, gpu)
            for batch in (size for size in BATCHES if planner.fits(size)):
                say(f"{kind}, {'float32' if precision == 'no' else precision}, batch {batch}")
                trace = planner.trace(batch)
                with Measured(config, batch) as run:
                    checks.append(Check(config, trace, run.steps(STEPS)))
                    timed, _ = run.operations(trace)
                samples += [sample_of(op, seconds, gpu) for op, seconds in timed if seconds > 0]
        say(f"{kind}, the host")
        host[kind] = _issuing(kind, gpu)
    host["any"] = _mean(host.values())
    speeds = Speeds(gpu.name, torch.__version__, str(date.today()), tuple(merged(samples)), host)
    return _with_errors(speeds, gpu, checks)


def settings(kind: str, precision: str = "no", robot: Robot | None = None) -> TrainConfig:
    """A run of a policy with its own defaults."""
    policy = (robot or ROBOTS[kind]).fill_in(policy_class(kind).Config())
    return TrainConfig(policy=policy, precision=precision)  # type: ignore[arg-type]


def merged(samples: Iterable[Sample]) -> list[Sample]:
    """One for each place: the median of what was seen there."""
    seen: dict[tuple[str, str, tuple[float, ...]], list[float]] = defaultdict(list)
    for name, dtype, at, times in samples:
        seen[name, dtype, at].append(times)
    return [Sample(*place, times=round(statistics.median(seen[place]), 3)) for place in sorted(seen)]


def _issuing(kind: str, gpu: GPU) -> dict[str, float]:
    """Seconds that the host takes for a common operation, by phase of a step."""
    costs = []
    for precision in ("no", "bf16"):
        robot = ROBOTS[kind]
        tiny = Robot(robot.cameras, min(robot.height, 96), min(robot.width, 96))
        config = settings(kind, precision, tiny)
        trace = trace_step(config, 2, gpu)
        with Measured(config, 2) as run:
            seconds, phases = run.steps(STEPS), run.host()
        pace = seconds / sum(phases.values())  # waiting after each step, as `host` does, slows the host down
        phases = {phase: pace * time for phase, time in phases.items()}
        costs.append(per_operation(steps_ops(trace), phases))
    return _mean(costs)


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
