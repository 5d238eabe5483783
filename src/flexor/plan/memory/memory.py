"""How much GPU memory a run needs, for what, and when: a trace replayed on the allocator, plus memory outside of it.

A run with CUDA graphs takes its first steps eagerly and then captures one, which has memory of its own: the peak is in
whichever of the two needs more.

Outside the allocator are the CUDA context with its kernels, and NCCL's buffers for several processes. What several
processes change in a trace is in `ranks`.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field, replace

from flexor.config.for_gpu import settle_for_gpu
from flexor.config.schema import SHARDED, TrainConfig
from flexor.plan.memory.allocator import MIB, OutOfMemory, Peak, replay
from flexor.plan.memory.bound import LeastMemory, least_memory
from flexor.plan.memory.ranks import sharded, with_buckets
from flexor.plan.trace.cuda_on_meta import Card
from flexor.plan.trace.events import Trace
from flexor.plan.trace.features import reads_features
from flexor.plan.trace.traces import Traces
from flexor.train.build import captures_steps
from flexor.train.graph import WARM_UP, wants_graph, why_not
from flexor.train.ranks.split import hsdp_sizes, split_batch

MOST = 4096  # samples per pass; larger batch sizes are not searched
# Samples per pass for the extrapolation of the peak. With fewer, memory that does not grow with them may dominate.
FAR = (32, 64)
INTERPOLATIONS = 4  # of the largest batch size, before halves are tried

CONTEXT = 500 * MIB  # CUDA context and the kernels that a run loads
CONTEXT_HOPPER = 840 * MIB  # measured on an H200: 839 to 841 MiB with CUDA 13
NCCL = 300 * MIB  # its buffers and kernels; 200 to 500 MiB, depending on the links
SPARE = 0.01  # share of a GPU's memory that stays free


@dataclass(frozen=True)
class Parallelism:
    """How a run is distributed over processes."""

    strategy: str = "one process"
    world_size: int = 1
    shards: int = 1
    """Of each weight."""


@dataclass
class MemoryPlan:
    """Bytes of one GPU at the peak of a run. The parts, `allocator` and `context` add up to `total`."""

    batch_size: int
    accumulation: int
    parallelism: Parallelism
    parts: dict[str, int]
    """weights, buffers, casts, gradients, optimizer, ema, batch, activations, workspaces, other: at the peak."""
    allocator: int
    """Reserved by torch's allocator, but unused at the peak."""
    context: int
    """Outside torch's allocator: CUDA's context, kernels, and NCCL's buffers."""
    phase: str
    """Where in a step the peak is: load, batch, forward, backward, clip, optimizer or ema."""
    operation: str
    module: str
    step: int
    timeline: list[tuple[int, int]] = field(repr=False)
    """(operation, bytes allocated after it) of a step."""

    @property
    def allocated(self) -> int:
        return sum(self.parts.values())

    @property
    def reserved(self) -> int:
        return self.allocated + self.allocator

    @property
    def total(self) -> int:
        """What `nvidia-smi` shows for the process."""
        return self.reserved + self.context

    def part(self, name: str) -> int:
        return self.parts.get(name, 0)

    def within(self, memory: int) -> MemoryPlan:
        """The same on a GPU where it just fits: torch returns unused memory when there is no more."""
        return replace(self, allocator=min(self.allocator, memory - self.allocated - self.context))


class MemoryPlanner:
    """Plans the memory of a run for any batch size. The first plan makes two traces, further plans are fast.

    `expandable`: torch's allocator uses expandable segments, as the trainer configures it.
    """

    def __init__(
        self,
        config: TrainConfig,
        gpu: Card,
        *,
        world_size: int = 1,
        local_world_size: int | None = None,
        expandable: bool = True,
        traces: Traces | None = None,
    ):
        self.config = settle_for_gpu(config, gpu.compute_capability)
        self.gpu, self.expandable = gpu, expandable
        self.world_size = world_size
        self.local_world_size = local_world_size or world_size
        self.traces = traces or Traces(self.config)

    def trace(self, batch_size: int, accumulation: int | None = None, *, costs: bool = True) -> Trace:
        """The trace of a step with this many samples per pass, in one of the run's processes."""
        accumulation = accumulation or self.accumulation(batch_size)
        options = {"costs": costs, "features": reads_features(self.config)}
        trace = self.traces.at(batch_size, accumulation, self.gpu, **options)
        if (
            trace.float32_on_host and self.parallelism(trace).shards > 1
        ):  # shards have frozen weights in float32
            return self._sharded_traces.at(batch_size, accumulation, self.gpu, **options)
        return trace

    @functools.cached_property
    def _sharded_traces(self) -> Traces:
        return Traces(replace(self.config, parallel=replace(self.config.parallel, strategy="fsdp")))

    def accumulation(self, batch_size: int) -> int:
        return split_batch(replace(self.config, batch_size=batch_size), self.world_size).accumulation

    def at(self, batch_size: int, accumulation: int | None = None) -> MemoryPlan:
        trace = self.trace(batch_size, accumulation, costs=False)
        return self.plan(trace)

    def plan(self, trace: Trace) -> MemoryPlan:
        peak = _peak(self.trace_of_rank(trace), self._is_graph(trace), self.expandable)
        op = trace.ops[peak.op]
        return MemoryPlan(
            batch_size=trace.batch_size,
            accumulation=trace.accumulation,
            parallelism=self.parallelism(trace),
            parts=peak.by_category,
            allocator=peak.reserved - peak.allocated,
            context=self.context,
            phase=op.phase,
            operation=op.name,
            module=op.module,
            step=peak.step,
            timeline=peak.timeline,
        )

    def _is_graph(self, trace: Trace) -> bool:
        return is_captured(self.config, self.gpu, trace, self.parallelism(trace))

    def trace_of_rank(self, trace: Trace) -> Trace:
        """The trace of one process of a multi-process run."""
        parallelism = self.parallelism(trace)
        if parallelism.strategy == "one process":
            return trace
        if parallelism.strategy == "ddp":
            return with_buckets(trace, kept_by_graph=exchanges_over_gloo(self.config))
        return sharded(trace, parallelism.shards, self.config.parallel, half=self.config.precision != "no")

    def parallelism(self, trace: Trace) -> Parallelism:
        world_size, parallel = self.world_size, self.config.parallel
        if world_size == 1 and parallel.strategy not in SHARDED:
            return Parallelism()
        strategy: str = parallel.strategy
        if strategy == "auto":
            strategy = self._automatic(trace)
        if strategy == "ddp":
            return Parallelism("ddp", world_size)
        if strategy == "fsdp":
            return Parallelism("fsdp", world_size, world_size)
        _, shards = hsdp_sizes(world_size, self.local_world_size, parallel.dp_replicate, parallel.dp_shard)
        return Parallelism("hsdp", world_size, shards)

    def _automatic(self, trace: Trace) -> str:
        """The same choice as in `train.build.pick_strategy`."""
        if self.config.lora.base:
            return "ddp"
        average = 4 * trace.trained if self.config.ema.enable else 0
        need, room = trace.nbytes("weights") + 3 * trace.gradients + average, self.gpu.memory // 2
        if need <= room:
            return "ddp"
        nodes = self.world_size > self.local_world_size
        return "hsdp" if nodes and need / self.local_world_size <= room else "fsdp"

    def fits(self, batch_size: int, accumulation: int | None = None) -> bool:
        """Whether it runs at all, even if torch must return cached memory to the driver at times."""
        trace = self.trace(batch_size, accumulation, costs=False)
        if self.least(trace).peak > self.capacity:
            return False
        rank, graph = self.trace_of_rank(trace), self._is_graph(trace)
        try:
            replay(rank, WARM_UP, capacity=self.capacity, expandable=self.expandable, graph=graph)
        except OutOfMemory:
            return False
        return True

    def never_fits(self, trace: Trace) -> bool:
        """Whether a run does not fit with any batch size: what is never freed is too much."""
        return self.least(trace).state > self.capacity

    def least(self, trace: Trace) -> LeastMemory:
        return least_memory(self.trace_of_rank(trace))

    @property
    def capacity(self) -> int:
        """Bytes for torch's allocator."""
        return usable(self.gpu) - self.context

    @property
    def context(self) -> int:
        """Bytes outside torch's allocator."""
        return context_of(self.gpu, 1 if exchanges_over_gloo(self.config) else self.world_size)

    def largest_batch(self, accumulation: int | None = None, like: Trace | None = None) -> int:
        """The largest number of samples per pass that fits, up to `MOST`; 0 if not even one fits.

        `like`: a trace of any batch size, if there is one.
        """
        accumulation = accumulation or self.config.gradient_accumulation_steps or 1
        if self.never_fits(like or self.trace(FAR[0], accumulation, costs=False)):
            return 0
        most = self._most_at_least(accumulation)
        fits, too_many, width = most, most + 1, max(1, most // 64)
        while fits > 0 and not self.fits(fits, accumulation):
            fits, too_many, width = max(0, fits - width), fits, 2 * width
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            fits, too_many = (middle, too_many) if self.fits(middle, accumulation) else (fits, middle)
        return fits

    def _most_at_least(self, accumulation: int) -> int:
        """The largest batch size of which the sum of all tensors fits: few samples more than fit in fact."""

        def least(size: int) -> int:
            return self.least(self.trace(size, accumulation, costs=False)).peak

        (less, of_less), (more, of_more) = ((size, least(size)) for size in FAR)
        slope = max(1.0, (of_more - of_less) / (more - less))
        fits, too_many, guess = 0, MOST + 1, more + (self.capacity - of_more) / slope
        for attempt in itertools.count():
            if too_many - fits == 1:
                break
            size = round(guess) if attempt < INTERPOLATIONS else (fits + too_many) // 2
            size = min(max(size, fits + 1), too_many - 1)
            free = self.capacity - least(size)
            fits, too_many = (size, too_many) if free >= 0 else (fits, size)
            guess = size + (max(1.0, free / slope) if free >= 0 else min(-1.0, free / slope))
        return fits


@functools.lru_cache(maxsize=32)
def _peak(rank: Trace, graph: bool, expandable: bool) -> Peak:
    """Of a run without limits. GPUs that behave the same share traces, and so this too."""
    return replay(rank, WARM_UP, expandable=expandable, graph=graph)


def context_of(gpu: Card, world_size: int = 1) -> int:
    """Bytes outside torch's allocator."""
    if gpu.compute_capability is None:
        return 0
    context = CONTEXT_HOPPER if gpu.compute_capability[0] in (9, 10) else CONTEXT
    return context + (NCCL if world_size > 1 else 0)


def usable(gpu: Card) -> int:
    """Bytes that a process may use. Some stay free: allocators leave gaps, and other programs need memory too."""
    return round(gpu.memory * (1 - SPARE))


def exchanges_over_gloo(config: TrainConfig) -> bool:
    """Whether processes on GPUs exchange through the host's memory."""
    return config.parallel.backend == "gloo"


def is_captured(config: TrainConfig, gpu: Card, trace: Trace, parallelism: Parallelism) -> bool:
    """Whether the trainer replays the steps of the run's last phase as a CUDA graph. The settings are settled."""
    reason = why_not(
        config,
        on_nvidia=gpu.compute_capability is not None,
        strategy=parallelism.strategy,
        captures=captures_steps(config),
    )
    return wants_graph(config, reason) and trace.steps[-1].graph_key is not None and not trace.waits
