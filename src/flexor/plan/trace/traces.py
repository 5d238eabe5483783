"""The traces of one run for every batch size and every GPU, made as seldom as possible.

A trace takes most of a second. Two give every batch size (`rescale.py`), passes beyond the second of a step are like
it, and GPUs on which torch decides alike share theirs: only the kernel of attention depends on the card, and the
workspace of cuBLAS.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from flexor.config.schema import TrainConfig
from flexor.plan.trace.cuda_on_meta import HALF, Card
from flexor.plan.trace.events import Trace
from flexor.plan.trace.rescale import NotAlike, rescale
from flexor.plan.trace.trace import trace_step
from flexor.plan.trace.workspaces import cublas_workspace

LOW, HIGH = 2, 4  # batch sizes that are traced; a batch of one takes branches of its own
PASSES = 2  # that differ

Capability = tuple[int, int] | None


@dataclass(frozen=True)
class StandIn:
    """A card that others are traced as."""

    compute_capability: Capability
    memory: int = 0


class Traces:
    """What steps of a run do, by batch size, passes and card.

    Unless they are `scalable`, each batch size is traced by itself, which is quicker if there is but one.
    """

    def __init__(self, config: TrainConfig, scalable: bool = True):
        self.config = config
        self._made: dict[tuple[int, int, Capability], Trace] = {}
        self._scaled: dict[tuple[int, int, Capability], Trace] = {}
        self.scalable = scalable

    def at(
        self, batch_size: int, accumulation: int, gpu: Card, *, costs: bool = True, exact: bool = True
    ) -> Trace:
        """A step with that many samples in each pass, as one process alone does it.

        Without `costs` what its operations cost may be that of another batch size. Unless it is to be `exact`, a pass
        of one sample is extended from others too, and cards that have fused attention of any kind are alike.
        """
        single = (batch_size < LOW and exact) or not self.scalable
        key = (batch_size, accumulation, self._stand_in(gpu.compute_capability, exact))
        if single:
            trace = self._traced(*key)
        elif key in self._scaled:
            trace = self._scaled[key]
        else:
            trace = self._rescaled(*key, costs=costs)
            if costs:
                self._scaled[key] = trace
        return _with_workspaces(trace, cublas_workspace(gpu.compute_capability))

    def _rescaled(self, batch_size: int, accumulation: int, stands: Capability, *, costs: bool) -> Trace:
        passes = min(accumulation, PASSES)
        low, high = (self._traced(size, passes, stands) for size in (LOW, HIGH))
        if passes == accumulation and batch_size in (LOW, HIGH):
            return low if batch_size == LOW else high
        try:
            low = replace(low, accumulation=accumulation)
            return rescale(low, high, batch_size, self.config, costs=costs)
        except NotAlike:
            self.scalable = False
            return self._traced(batch_size, accumulation, stands)

    def _traced(self, batch_size: int, accumulation: int, stands: Capability) -> Trace:
        key = (batch_size, accumulation, stands)
        if key not in self._made:
            self._made[key] = trace_step(self.config, batch_size, StandIn(stands), accumulation)
        return self._made[key]

    def _stand_in(self, capability: Capability, exact: bool) -> Capability:
        """A card on which torch decides as on this one; one that was traced already, if there is."""
        own = _kind(capability)
        seen = {stands: trace for (_, _, stands), trace in self._made.items()}
        if own in seen:
            return own
        fused = [stands for stands in seen if stands is not None and stands >= (8, 0)]
        if fused and not exact and own != (7, 5):
            return fused[0]
        return next((stands for stands, trace in seen.items() if _alike(trace, stands, own)), own)


def _kind(capability: Capability) -> Capability:
    """One card for all that torch has the same kernels of attention for."""
    if capability is None or capability in ((9, 0), (10, 0)):
        return capability
    return (7, 5) if capability < (8, 0) else (8, 0)


def _alike(trace: Trace, card: Capability, other: Capability) -> bool:
    """Whether a step on one card is the same on another: in float32 all that have CUDA take the same attention."""
    if not trace.attention:
        return True
    return None not in (card, other) and not any(dtype in HALF for _, _, dtype, _ in trace.attention)


@functools.lru_cache(maxsize=8)
def _with_workspaces(trace: Trace, size: int) -> Trace:
    """With workspaces of cuBLAS as large as those on another card."""
    own = [n for n, category in trace.category.items() if category == "workspaces"]
    if all(event.nbytes == size for event in trace.events if event.what == "born" and event.storage in own):
        return trace
    events = [
        event._replace(nbytes=size) if event.what == "born" and event.storage in own else event
        for event in trace.events
    ]
    return replace(trace, events=events)
