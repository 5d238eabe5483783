"""The traces of one run for every batch size and every GPU, with as few traces as possible.

A trace takes most of a second. Two traces give every batch size (`rescale.py`), all passes of a step after the second
repeat it, and GPUs for which torch makes the same choices share traces: only the attention kernel and the cuBLAS
workspace depend on the GPU.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

from flexor.config.for_gpu import FP8_SINCE, settle_for_gpu
from flexor.config.schema import TrainConfig
from flexor.core.typed import with_settings
from flexor.plan.trace.cuda_on_meta import HALF, Capability, Card, like_in_kernels
from flexor.plan.trace.events import Trace
from flexor.plan.trace.rescale import OperationsDiffer, rescale
from flexor.plan.trace.trace import trace_step
from flexor.plan.trace.workspaces import cublas_workspace

LOW, HIGH = 2, 4  # batch sizes that are traced; a batch size of 1 takes other code paths
# In fp8, matrices have a multiple of 16 rows, and small ones are not in fp8.
LOW_FP8, HIGH_FP8 = 16, 32
PASSES = 2  # passes that differ


class RepresentativeGPU(NamedTuple):
    """A GPU whose trace is used for others."""

    compute_capability: Capability
    memory: int = 0


class Traces:
    """Traces of a run's steps, by batch size, passes and GPU. Settings that were left to the GPU are settled for each.

    Without `scalable`, each batch size is traced separately, which is faster if there is only one.
    """

    def __init__(self, config: TrainConfig, scalable: bool = True):
        self.config, self.scalable = config, scalable
        self._settled: dict[tuple[str, bool | None, bool], _SettledTraces] = {}

    def at(
        self,
        batch_size: int,
        accumulation: int,
        gpu: Card,
        *,
        costs: bool = True,
        exact: bool = True,
        features: bool = False,
    ) -> Trace:
        """The trace of a step with this many samples per pass, in one of the run's processes.

        Without `costs`, the costs of operations may be those of another batch size. Without `exact`, a pass of one
        sample is extrapolated from others too, and all GPUs with any kind of fused attention share traces.
        `features`: steps read features instead of images.
        """
        config = settle_for_gpu(self.config, gpu.compute_capability)
        config = with_settings(config, {"dataset.cache.features": "ram" if features else "off"})
        key = (config.precision, config.channels_last, features)
        if key not in self._settled:
            self._settled[key] = _SettledTraces(config, self.scalable)
        return self._settled[key].at(batch_size, accumulation, gpu, costs=costs, exact=exact)

    @property
    def made(self) -> list[tuple[int, int, Capability]]:
        """Batch size, passes and GPU of every trace that was made."""
        return [key for settled in self._settled.values() for key in settled._made]


class _SettledTraces:
    """Traces of settings that do not depend on the GPU."""

    def __init__(self, config: TrainConfig, scalable: bool):
        self.config = config
        self._made: dict[tuple[int, int, Capability], Trace] = {}
        self._scaled: dict[tuple[int, int, Capability], Trace] = {}
        self.scalable = scalable and config.policy.same_operations
        self.low, self.high = (LOW_FP8, HIGH_FP8) if config.precision == "fp8" else (LOW, HIGH)

    def at(self, batch_size: int, accumulation: int, gpu: Card, *, costs: bool, exact: bool) -> Trace:
        single = (batch_size < self.low and exact) or not self.scalable
        key = (batch_size, accumulation, self._representative(gpu.compute_capability, exact))
        if single:
            trace = self._traced(*key)
        elif key in self._scaled:
            trace = self._scaled[key]
        else:
            trace = self._rescaled(*key, costs=costs)
            if costs:
                self._scaled[key] = trace
        return _with_workspaces(trace, cublas_workspace(gpu.compute_capability))

    def _rescaled(self, batch_size: int, accumulation: int, capability: Capability, *, costs: bool) -> Trace:
        passes = min(accumulation, PASSES)
        if passes == accumulation and batch_size in (self.low, self.high):
            return self._traced(batch_size, passes, capability)
        low, high = (self._traced(size, passes, capability) for size in (self.low, self.high))
        try:
            low = replace(low, accumulation=accumulation)
            return rescale(low, high, batch_size, self.config, costs=costs)
        except OperationsDiffer:
            self.scalable = False
            return self._traced(batch_size, accumulation, capability)

    def _traced(self, batch_size: int, accumulation: int, capability: Capability) -> Trace:
        key = (batch_size, accumulation, capability)
        if key not in self._made:
            gpu = RepresentativeGPU(capability)
            self._made[key] = trace_step(self.config, batch_size, gpu, accumulation)
        return self._made[key]

    def _representative(self, capability: Capability, exact: bool) -> Capability:
        """A GPU for which torch makes the same choices; if possible, one that was traced already."""
        capability = FP8_SINCE if self._is_like_ada(capability) else like_in_kernels(capability)
        traced = {gpu: trace for (_, _, gpu), trace in [*self._made.items()]}  # other threads may add some
        if capability in traced:
            return capability
        fused = [gpu for gpu in traced if gpu is not None and gpu >= (8, 0)]
        if fused and not exact and capability != (7, 5):
            return fused[0]
        return next((gpu for gpu, trace in traced.items() if _same_step(trace, gpu, capability)), capability)

    def _is_like_ada(self, capability: Capability) -> bool:
        """Whether it stands for a kind of GPUs, of which the oldest do not multiply in fp8."""
        return self.config.precision == "fp8" and like_in_kernels(capability) == (8, 0)


def _same_step(trace: Trace, gpu: Capability, other: Capability) -> bool:
    """Whether a step is the same on two GPUs: in float32 all CUDA GPUs use the same attention kernel."""
    if not trace.attention:
        return True
    return None not in (gpu, other) and not any(dtype in HALF for _, _, dtype, _ in trace.attention)


@functools.lru_cache(maxsize=32)
def _with_workspaces(trace: Trace, size: int) -> Trace:
    """The trace with cuBLAS workspaces of another size."""
    workspaces = {n for n, category in trace.category.items() if category == "workspaces"}
    events = list(trace.events)
    for at, event in enumerate(events):
        if event.kind == "alloc" and event.storage in workspaces and event.nbytes != size:
            events[at] = event._replace(nbytes=size)
    return trace if events == trace.events else replace(trace, events=events)
