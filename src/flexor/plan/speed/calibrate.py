"""Measure this machine's GPU and host for a few minutes, so that plans use its real speed.

The built-in policies train for some steps on synthetic batches. A profile of a step shows how long each operation took;
these times are the samples that other operations are compared with (see `speeds.py`); the matrix products of large
models are measured apart, because such a model may not fit. Steps on tiny images, with
almost no GPU work, show how long the host takes to launch an operation. They are measured repeatedly during the
calibration, because other programs use the host too, and the speed of a shared host varies by a factor of two. The
same steps as CUDA graphs show how long the GPU pauses between kernels. Then whole steps, eager and as CUDA graphs, are
predicted from these measurements. The error of the prediction is the uncertainty of later plans.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import date
from typing import Any, NamedTuple

import torch

from flexor.config.schema import TrainConfig
from flexor.plan.data.imagined_robot import Robot
from flexor.plan.memory.memory import MemoryPlanner
from flexor.plan.site.hardware import GPU
from flexor.plan.speed.ceilings import fastest
from flexor.plan.speed.measure import WARM_UP, MeasuredRun
from flexor.plan.speed.speeds import VIEW, Sample, Speeds, sample_of
from flexor.plan.speed.time import step_time, steps_ops
from flexor.plan.trace.events import Trace
from flexor.plan.trace.ops import Op, describe
from flexor.plan.trace.trace import trace_step
from flexor.plan.trace.traces import Traces
from flexor.policies import POLICIES, policy_class
from flexor.policies.calibration import Calibration

PRECISIONS = ("no", "bf16")
BATCHES = (4, 32)
LEAST = 0.05  # smallest relative error to report: a machine's speed varies from day to day
STEPS = 4  # in each measured time window
FEW = 4  # steps per measurement of the host

HOSTS_GIB = 5  # of GPU memory for the policies that the host is measured with
# tokens, and inputs and outputs of linear layers of large models, which the measured policies do not have
ROWS, LAYERS = (4096, 16384), ((1024, 1024), (1024, 4096), (2048, 2048), (2048, 16384), (16384, 2048))
PRODUCT_WINDOWS, PRODUCT_S = 3, 0.01


class Check(NamedTuple):
    """The measured time of a whole step."""

    config: TrainConfig
    trace: Trace
    seconds: float


def calibrations() -> dict[str, Calibration]:
    """The policies that are measured, and with which inputs."""
    every = {kind: policy_class(kind).Config.calibration for kind in POLICIES}
    return {kind: calibration for kind, calibration in every.items() if calibration}


def calibrate(gpu: GPU, log: Callable[[str], None]) -> Speeds:
    """Measured speeds of this GPU and its host, for plans."""
    kinds = calibrations()
    samples: list[Sample] = []
    checks: list[Check] = []
    log("preparing the measurement of the host")
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(HostMeasurement(kind, precision, gpu))
            for kind in kinds
            for precision in PRECISIONS
        ]
        for kind in kinds:
            for precision in PRECISIONS:
                for config, batch in _runs(kind, precision, gpu):
                    layout = ", channels last" if config.channels_last else ""
                    log(f"{kind}, {'float32' if precision == 'no' else precision}{layout}, batch {batch}")
                    _measure(config, batch, gpu, samples, checks)
            for host in hosts:
                host.measure()
        gaps = [host.gap() for host in hosts]
    log("matrix products of large models")
    device = torch.device("cuda", torch.cuda.current_device())
    samples += [sample_of(op, seconds, gpu) for op, seconds in large_products(device)]
    costs = {kind: _mean(host.costs() for host in hosts if host.kind == kind) for kind in kinds}
    costs["any"] = _mean(costs.values())
    measured = (str(date.today()), tuple(merged(samples)), costs)
    speeds = Speeds(gpu.name, torch.__version__, *measured, gap=statistics.median(gaps))
    return _with_errors(speeds, gpu, checks)


def _runs(kind: str, precision: str, gpu: GPU) -> Iterator[tuple[TrainConfig, int]]:
    """What is measured of a policy: each batch size that fits in channels-last format, the largest in both formats."""
    room = replace(gpu, memory_gib=gpu.memory_gib - HOSTS_GIB)
    config = settings(kind, precision, channels_last=True)
    planner = MemoryPlanner(replace(config, step="graph"), room, traces=Traces(config, scalable=False))
    fitting = [size for size in BATCHES if planner.fits(size)]
    for batch in fitting:
        yield config, batch
    if fitting:
        yield replace(config, channels_last=False), fitting[-1]


def _measure(config: TrainConfig, batch: int, gpu: GPU, samples: list[Sample], checks: list[Check]) -> None:
    """The operations of a step, and the time of whole steps, eager and as a CUDA graph."""
    trace = trace_step(config, batch, gpu)
    with MeasuredRun(config, batch) as run:
        checks.append(Check(config, trace, run.steps(STEPS)))
        operations, _ = run.operations(trace)
        samples += [sample_of(op, seconds, gpu) for op, seconds in operations if seconds > 0]
        run.capture()
        checks.append(Check(replace(config, step="graph"), trace, run.steps(STEPS)))


def large_products(device: torch.device) -> Iterator[tuple[Op, float]]:
    """The matrix products of linear layers in bf16, forward and backward, with their seconds."""
    mm, addmm = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
    with contextlib.suppress(torch.OutOfMemoryError):  # the largest last
        for rows, (inner, columns) in itertools.product(ROWS, LAYERS):
            x, weight, gradient, bias = (
                torch.randn(*shape, device=device, dtype=torch.bfloat16)
                for shape in ((rows, inner), (columns, inner), (rows, columns), (columns,))
            )
            products = ((addmm, (bias, x, weight.t())), (mm, (gradient, weight)), (mm, (gradient.t(), x)))
            for function, factors in products:
                op = describe(function, factors, factors, [function(*factors)], "forward")
                yield op, fastest(functools.partial(function, *factors), device, PRODUCT_WINDOWS, PRODUCT_S)


def settings(
    kind: str,
    precision: str = "no",
    robot: Robot | None = None,
    *,
    channels_last: bool = False,
    **changes: Any,
) -> TrainConfig:
    """A run of a policy with eager steps and its defaults, except for `changes`."""
    calibration = calibrations()[kind]
    robot = robot or Robot(*calibration[:3])
    policy = robot.fill_in(policy_class(kind).Config(**{**calibration.settings, **changes}))
    return TrainConfig(policy=policy, precision=precision, step="eager", channels_last=channels_last)  # type: ignore[arg-type]


def merged(samples: Iterable[Sample]) -> list[Sample]:
    """One sample per operation and size: the median of the measured times."""
    groups: dict[tuple[str, str, tuple[float, ...]], list[float]] = defaultdict(list)
    for name, dtype, extents, times in samples:
        groups[name, dtype, extents].append(times)
    return [Sample(*key, times=round(statistics.median(times), 3)) for key, times in sorted(groups.items())]


class HostMeasurement(MeasuredRun):
    """A policy's steps with almost no GPU work: how long the host takes per operation."""

    def __init__(self, kind: str, precision: str, gpu: GPU):
        self.kind = kind
        calibration = calibrations()[kind]
        tiny = Robot(calibration.cameras, min(calibration.height, 96), min(calibration.width, 96))
        config = settings(kind, precision, tiny, channels_last=True, **calibration.narrow)
        self.ops = list(steps_ops(trace_step(config, 2, gpu)))
        self.measurements: list[dict[str, float]] = []  # host seconds by phase
        super().__init__(config, 2)

    def measure(self) -> None:
        self.window(WARM_UP)  # the previous measurement has freed its memory
        seconds, phases = self.window(FEW), self.host(FEW)
        scale = seconds / sum(phases.values())  # `host` waits after each step, which slows the host down
        self.measurements.append({phase: scale * time for phase, time in phases.items()})

    def gap(self) -> float:
        """GPU seconds between two kernels of these steps as a CUDA graph. From here on, they are one."""
        count, seconds = self.kernels()
        self.capture()
        return max(0.0, self.steps(FEW) - seconds) / count

    def costs(self) -> dict[str, float]:
        """Host seconds per common operation, by phase of a step."""
        phases = self.measurements[0]
        return per_operation(
            self.ops, {p: statistics.median(m[p] for m in self.measurements) for p in phases}
        )


def per_operation(ops: Iterable[Op], seconds: dict[str, float]) -> dict[str, float]:
    """Host seconds per common operation in each phase. Work after the optimizer counts for the step as a whole."""
    units: dict[str, float] = defaultdict(float)
    for op in ops:
        units[op.phase] += VIEW if op.kind == "view" else op.host
    phases = [phase for phase in seconds if phase != "ema"]
    return {"step": seconds.get("ema", 0.0), **{phase: seconds[phase] / units[phase] for phase in phases}}


def _mean(costs: Iterable[dict[str, float]]) -> dict[str, float]:
    phases: dict[str, list[float]] = defaultdict(list)
    for cost in costs:
        for phase, seconds in cost.items():
            phases[phase].append(seconds)
    return {phase: statistics.mean(seconds) for phase, seconds in phases.items()}


def _with_errors(speeds: Speeds, gpu: GPU, checks: list[Check]) -> Speeds:
    """Add the prediction errors for the measured whole steps."""
    errors: dict[str, list[float]] = {"gpu": [], "host": []}
    for config, trace, seconds in checks:
        planned = step_time(trace, gpu, config=config, speeds=speeds)
        errors["host" if planned.bound == "host" else "gpu"].append(abs(planned.seconds / seconds - 1))
    spreads = {bound: max([LEAST, *values]) for bound, values in errors.items()}
    return replace(speeds, spread_gpu=spreads["gpu"], spread_host=max(spreads["host"], spreads["gpu"]))
