"""Measure a run's steps on this machine's GPU, without data: memory, time, and the time of each operation."""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from flexor.config.for_gpu import settle_for_gpu
from flexor.config.schema import TrainConfig
from flexor.plan.speed.time import steps_ops
from flexor.plan.trace.events import Category, Event, ReadyGradient, Trace
from flexor.plan.trace.ops import NAMESPACE, Op, Phase
from flexor.plan.trace.rehearsal import Rehearsal
from flexor.train import graph

WINDOWS = 3  # time windows to measure
# Steps in which cuDNN chooses its kernels, the allocator reaches a steady state, and a step is captured.
WARM_UP = graph.WARM_UP + 1


class Stopwatch:
    """Watches a rehearsal: measures how long the host spends in each phase of a step."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ready: list[ReadyGradient] = []
        self.seconds: dict[str, float] = defaultdict(float)
        self._phase: Phase = "build"
        self._since = time.perf_counter()

    @property
    def phase(self) -> Phase:
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        now = time.perf_counter()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def name(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Does nothing: memory is measured by the allocator."""

    def gradient_ready(self, weight: nn.Parameter, unit: int, leaf: Tensor) -> None:
        """Does nothing: only traces note it."""


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of a run's first steps."""

    allocated: int
    reserved: int
    process: int
    """All used GPU memory; this is the process's memory if no other process uses the GPU."""


class MeasuredRun:
    """A run on the GPU, eager or as a CUDA graph, as its settings say. Its memory is freed at the end."""

    def __init__(self, config: TrainConfig, batch_size: int, accumulation: int = 1):
        self.device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.watch = Stopwatch()
        config = settle_for_gpu(config, torch.cuda.get_device_capability(self.device))
        self.run = Rehearsal(config, batch_size, accumulation, self.watch, self.device)
        self.number = self.run.steps_to_trace()[-1]  # of a step in the last phase
        for number in self.run.steps_to_trace():
            self.run.step(number)
        self.window(WARM_UP)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        del self.run
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def steps(self, count: int) -> float:
        """Seconds per step: the median, because other programs use the host too."""
        return statistics.median(self.windows(count))

    def windows(self, count: int) -> list[float]:
        return [self.window(count) for _ in range(WINDOWS)]

    def window(self, count: int) -> float:
        """Seconds per step, averaged over `count` steps without waiting in between."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            self.run.step(self.number)
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / count

    def memory(self) -> Memory:
        free, total = torch.cuda.mem_get_info()
        stats = torch.cuda.memory_stats()
        reserved = stats["reserved_bytes.all.peak"]
        outside = total - free - stats["reserved_bytes.all.current"]
        return Memory(stats["allocated_bytes.all.peak"], reserved, outside + reserved)

    def host(self, count: int = 10) -> dict[str, float]:
        """Host seconds for each phase of a step, with an idle GPU at the start of the step."""
        torch.cuda.synchronize()
        self.watch.phase = "build"
        self.watch.seconds.clear()
        for _ in range(count):
            self.run.step(self.number)
            self.watch.phase = "build"
            torch.cuda.synchronize()
        return {phase: seconds / count for phase, seconds in self.watch.seconds.items() if phase != "build"}

    def capture(self) -> None:
        """From here on, steps are replayed as a CUDA graph."""
        self.run.capture()
        self.window(WARM_UP)

    def operations(self, trace: Trace) -> tuple[list[tuple[Op, float]], float]:
        """The operations of a trace with their GPU seconds, and their share of the step's total GPU time.

        Steps must be eager: a profile of a graph shows kernels, but not which operations they belong to.
        """
        return pair(list(steps_ops(trace)), self._profiled())

    def kernels(self) -> tuple[int, float]:
        """The number of kernels of an eager step, and their GPU seconds."""
        durations = [kernel.duration for event in self._profiled() for kernel in event.kernels]
        return len(durations), sum(durations) * 1e-6

    def _profiled(self) -> list[Any]:
        from torch.profiler import ProfilerActivity, profile

        with profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True
        ) as profiled:
            self.run.step(self.number)
            torch.cuda.synchronize()
        return list(profiled.events())


def pair(ops: list[Op], events: list[Any]) -> tuple[list[tuple[Op, float]], float]:
    """Pair the operations of a trace with the same ones in a profile, in order. Also returns their share of GPU time.

    A profile may have a few more or fewer operations of a name. Then only those are paired whose first input shape
    occurs equally often in both.
    """
    traced, profiled = defaultdict(list), defaultdict(list)
    for op in ops:
        if op.kind != "view":
            traced[op.name].append((op.shapes[:1], op))
    for name, shape, seconds in _profiled(events, set(traced)):
        profiled[name].append((shape, seconds))
    paired = [pair for name, ops_of_name in traced.items() for pair in _matches(ops_of_name, profiled[name])]
    total = sum(sum(kernel.duration for kernel in event.kernels) for event in events) * 1e-6
    return paired, sum(seconds for _, seconds in paired) / max(total, 1e-12)


def _profiled(events: list[Any], names: set[str]) -> Iterator[tuple[str, tuple, float]]:
    """The operations with these names in a profile: name, first input shape, and GPU seconds with their calls."""
    waiting = [e for e in events if e.cpu_parent is None and str(e.device_type).endswith("CPU")]
    waiting.sort(key=lambda e: e.time_range.start, reverse=True)
    while waiting:
        event = waiting.pop()
        name = event.name.removeprefix("aten::")  # Flexor's own operators keep their namespace
        if name in names and event.name.startswith(("aten::", NAMESPACE)):
            shape = next((tuple(s) for s in event.input_shapes or [] if s), None)
            yield name, () if shape is None else (shape,), event.device_time_total * 1e-6
        else:
            waiting += sorted(event.cpu_children, key=lambda e: e.time_range.start, reverse=True)


def _matches(traced: list[tuple], profiled: list[tuple]) -> Iterator[tuple[Op, float]]:
    """Pairs of an operation and its seconds, from the (shape, operation) and the (shape, seconds) of one name."""
    if len(traced) == len(profiled):
        yield from zip((op for _, op in traced), (seconds for _, seconds in profiled))
        return
    for shape in {shape for shape, _ in traced}:
        ops, seconds = ([value for at, value in pairs if at == shape] for pairs in (traced, profiled))
        if len(ops) == len(seconds):
            yield from zip(ops, seconds)
