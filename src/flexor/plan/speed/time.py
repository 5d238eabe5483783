"""How long a training step takes: the GPU executes operations one after the other, and the host launches them.

The host launches a step's operations ahead of the GPU. Over many steps, the slower of the two determines the step time.
A CUDA graph launches all operations of a step at once: then the GPU determines it, with a small gap before each kernel.
Communication between GPUs overlaps with the backward pass (DDP, see `overlap.py`) or with all GPU work (sharding) as
far as possible.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from flexor.config.for_gpu import settle_for_gpu
from flexor.config.schema import TrainConfig
from flexor.plan.memory.memory import Parallelism, exchanges_over_gloo, is_captured
from flexor.plan.site.hardware import GPU
from flexor.plan.site.links import Links, links_of
from flexor.plan.speed.overlap import NO_TRAFFIC, Sent, Traffic, packing, sent, traffic
from flexor.plan.speed.speeds import UNCALIBRATED_GPU, UNCALIBRATED_HOST, Speeds, assumed, limit, load
from flexor.plan.trace.events import Trace
from flexor.plan.trace.ops import Op

HIDDEN = 0.9  # share of the work that the communication of sharded weights can overlap with
LINK_SPREAD = 0.3  # relative error of the time that links take: none was measured

GAPS, PACKING = "gaps between kernels", "copies into buckets"
# Calls of the host to replay a step, as in `train.graph`: seed of dropout, replay, sum; keys of the noise, learning
# rates, zeros, norm, parts of the loss. All other calls copy inputs.
CALLS_PER_PASS, CALLS_PER_STEP = 3, 10

Bound = Literal["gpu", "host", "network"]


@dataclass(frozen=True)
class Clocks:
    """Seconds of one optimizer step with all its passes, on one GPU without the others."""

    gpu: dict[str, float]
    """GPU work by kind: matmul, convolution, attention, memory; and the gaps between kernels of a CUDA graph."""
    fusible: float
    """The part of `gpu` that a compiler could fuse at most: memory-bound operations in both passes."""
    host: dict[str, float]
    """Host time to launch the operations, by phase of the step."""
    loading: float
    """To copy batches to the GPU, on a separate stream."""
    gaps: float
    """GPU seconds between the kernels of a step in a CUDA graph; part of `gpu` if it has one."""
    flops: float
    """FLOPs of one GPU in a step."""
    seconds: float
    """The whole step, without waiting for data."""
    graph: bool
    """Whether a step is replayed as a CUDA graph."""

    @property
    def gpu_seconds(self) -> float:
        return sum(self.gpu.values())

    @property
    def host_seconds(self) -> float:
        return sum(self.host.values())

    @property
    def host_bound(self) -> bool:
        return not self.graph and self.host_seconds > self.gpu_seconds


@dataclass(frozen=True)
class StepTime(Clocks):
    """The time of one optimizer step, in seconds."""

    communication: float
    """Communication between GPUs."""
    exposed: float
    """The part of `communication` that does not overlap with computation."""
    spread: float
    """Relative: the step takes `seconds` times 1 - spread to 1 + spread."""
    bound: Bound
    mfu: float
    """Model FLOPs utilization: share of the data sheet's FLOP/s for the precision in use."""
    calibrated: bool

    @property
    def at_best(self) -> float:
        """Step time without launch overhead, as with CUDA graphs."""
        return self.gpu_seconds + (0.0 if self.graph else self.gaps) + self.exposed

    @property
    def compiled_at_best(self) -> float:
        """Step time without launch overhead and without everything that a compiler can fuse."""
        return self.at_best - self.fusible


def step_time(
    trace: Trace,
    gpu: GPU,
    *,
    config: TrainConfig,
    parallelism: Parallelism | None = None,
    speeds: Speeds | None = None,
    links: Links | None = None,
) -> StepTime:
    """How long a step of the last phase of a run takes.

    `speeds`: measured speeds (default: this machine's calibration for that GPU, or without one the reference).
    `links`: between the GPUs (default: of one node).
    """
    speeds = speeds or load(gpu) or assumed()
    calibrated = speeds.gpu == gpu.name and not speeds.elsewhere
    parallelism, config = parallelism or Parallelism(), settle_for_gpu(config, gpu.compute_capability)
    links = links or links_of(gpu, parallelism.world_size)
    links = links.over_gloo() if exchanges_over_gloo(config) else links
    graph = is_captured(config, gpu, trace, parallelism)
    copies = [op for _, op in packing(trace)] if parallelism.strategy == "ddp" else []
    clocks = _play(trace, gpu, speeds, config, graph, copies)
    likely, slow = (
        _traffic(trace, gpu, speeds, parallelism, config, clocks, links, slower)
        for slower in (1.0, 1 + LINK_SPREAD)
    )
    communication, exposed = likely
    seconds = max(clocks.seconds, clocks.loading) + exposed
    unit = "tf32" if config.precision == "no" else config.precision
    bound: Bound = "network" if exposed > seconds / 2 else "host" if clocks.host_bound else "gpu"
    return StepTime(
        **{**vars(clocks), "seconds": seconds},
        communication=communication,
        exposed=exposed,
        spread=_spread(speeds if calibrated else None, clocks) + (slow.exposed - exposed) / seconds,
        bound=bound,
        mfu=clocks.flops / seconds / gpu.flops(unit),
        calibrated=calibrated,
    )


def steps_ops(trace: Trace) -> Iterator[Op]:
    """The operations of a step of the last phase, when the optimizer's state already exists.

    All passes after the second repeat it.
    """
    first = trace.events[trace.steps[-1].start].op
    once = {e.op for e in trace.events if e.kind == "alloc" and trace.category[e.storage] == "optimizer"}
    ops = [op for index, op in enumerate(trace.ops[first:], first) if index not in once]
    begin, end = _last_pass(ops) if trace.accumulation > trace.passes else (0, 0)
    yield from ops[:end]
    for _ in range(trace.accumulation - trace.passes):
        yield from ops[begin:end]
    yield from ops[end:]


def _last_pass(ops: list[Op]) -> tuple[int, int]:
    """Where the last pass of a step with accumulation begins and ends; (0, 0) if there is no backward pass."""
    end = max((index for index, op in enumerate(ops, 1) if op.phase == "backward"), default=0)
    begin, in_forward = max(0, end - 1), False
    while begin > 0 and not (in_forward and ops[begin - 1].phase == "backward"):
        begin -= 1
        in_forward |= ops[begin].phase == "forward"
    return begin, end


@functools.lru_cache(maxsize=32)
def _different(trace: Trace, speeds: Speeds) -> list[tuple[Op, int, float]]:
    """Each distinct operation of a step, how often it occurs, and its time relative to its limit. Few of a step's
    thousands of operations are distinct."""
    groups: dict[tuple, tuple[Op, int]] = {}
    for op in steps_ops(trace):
        place = (op.name, op.layout, op.phase, op.dtype, op.extent)
        costs = (*place, op.flops, op.read, op.written, op.kernels, op.host)
        groups[costs] = (op, groups[costs][1] + 1 if costs in groups else 1)
    return [(op, count, speeds.times(op)) for op, count in groups.values()]


def _play(
    trace: Trace,
    gpu: GPU,
    speeds: Speeds,
    config: TrainConfig,
    graph: bool,
    copies: Iterable[Op] = (),
) -> Clocks:
    """`copies`: of gradients into buckets, in addition to the operations of the trace."""
    kinds: dict[str, float] = defaultdict(float)
    phases: dict[str, float] = defaultdict(float)  # host seconds by phase
    work: dict[str, float] = defaultdict(float)  # GPU seconds by phase
    phases["step"] = speeds.step_overhead_s(config.policy.type)
    flops = fusible = 0.0
    kernels = 0
    packed = [(op, 1, speeds.times(op)) for op in copies]
    for op, count, times in (*_different(trace, speeds), *packed):
        phases[op.phase] += count * speeds.launch_s(op, config.policy.type)
        flops += count * op.flops
        if op.kind != "view":
            seconds = count * times * limit(op, gpu)
            work[op.phase] += seconds
            if op.phase != "load":
                kinds[op.kind] += seconds
                kernels += count * op.kernels
            if op.kind == "memory" and op.phase in ("forward", "backward"):
                fusible += seconds
    if packed:
        kinds[PACKING] = sum(times * limit(op, gpu) for op, _, times in packed)
        kinds["memory"] -= kinds[PACKING]
        fusible -= kinds[PACKING]
    loading, gaps = work.pop("load", 0.0), kernels * speeds.gap
    if graph:
        phases = _replaying(trace, speeds, config, phases)
        kinds[GAPS] = gaps
    # The GPU may be a step behind the host. Over many steps, the slower clock determines the step time.
    host, device = sum(phases.values()), sum(kinds.values())
    seconds = max(host, device)
    if config.precision == "fp16" and not graph:
        # before the optimizer step, the scaler waits for the GPU to check that gradients are finite
        late_host, late_device = (clock["optimizer"] + clock["ema"] for clock in (phases, work))
        seconds = max(host - late_host, device - late_device) + max(late_host, late_device)
    return Clocks(dict(kinds), fusible, dict(phases), loading, gaps, flops, seconds, graph)


def _replaying(
    trace: Trace, speeds: Speeds, config: TrainConfig, eager: dict[str, float]
) -> dict[str, float]:
    """Host seconds by phase if a step is replayed: its inputs are copied, and all of its operations are one launch."""
    once = Op("copy_", "memory", "batch")
    calls = trace.accumulation * (len(trace.inputs) + CALLS_PER_PASS) + CALLS_PER_STEP
    outside = {phase: eager[phase] for phase in ("step", "load")}
    return defaultdict(float, **outside, replay=calls * speeds.launch_s(once, config.policy.type))


def _traffic(
    trace: Trace,
    gpu: GPU,
    speeds: Speeds,
    parallelism: Parallelism,
    config: TrainConfig,
    clocks: Clocks,
    links: Links,
    slower: float,
) -> Traffic:
    """Communication between GPUs over links that take `slower` times as long."""
    if parallelism.world_size == 1:
        return NO_TRAFFIC
    if parallelism.strategy != "ddp":
        seconds = slower * _sharded_seconds(trace, parallelism, config, links)
        return Traffic(seconds, max(0.0, seconds - HIDDEN * clocks.gpu_seconds))
    buckets, backward = _sent(trace, gpu, speeds, config.policy.type, clocks)
    if clocks.graph and exchanges_over_gloo(config):  # gloo is not part of a graph: the exchange follows it
        buckets = [bucket._replace(ready=backward) for bucket in buckets]
    return traffic(buckets, backward, lambda nbytes: slower * links.all_reduce(nbytes))


def _sharded_seconds(trace: Trace, parallelism: Parallelism, config: TrainConfig, links: Links) -> float:
    """Gathering weights and summing gradients. HSDP does it within groups, and sums gradients between them."""
    once = sum(unit.gathered(config.precision != "no") for unit in trace.units)
    gathered = 2 * once if config.parallel.reshard_after_forward else once
    gradients = 4 * trace.trained
    if parallelism.shards < parallelism.world_size and parallelism.shards <= links.gpus:
        return links.within_nodes().gather(gathered + gradients) + links.between_nodes().all_reduce(gradients)
    return links.gather(gathered + gradients)


def _sent(trace: Trace, gpu: GPU, speeds: Speeds, policy: str, clocks: Clocks) -> tuple[list[Sent], float]:
    """When each bucket is full, on the slower of the two clocks."""
    if clocks.host_bound:
        return sent(trace, lambda op: speeds.launch_s(op, policy))
    gap = speeds.gap if clocks.graph else 0.0

    def on_gpu(op: Op) -> float:
        return 0.0 if op.kind == "view" else speeds.times(op) * limit(op, gpu) + gap * op.kernels

    return sent(trace, on_gpu)


def _spread(calibration: Speeds | None, clocks: Clocks) -> float:
    if calibration is None:
        return UNCALIBRATED_HOST if clocks.host_bound else UNCALIBRATED_GPU
    return calibration.spread_host if clocks.host_bound else calibration.spread_gpu
