"""Compute the trace of any batch size from the traces of two batch sizes.

A step has the same operations for every batch size of at least 2. Tensor sizes, FLOPs and extents are a constant plus
a part per sample, so each event is extrapolated linearly. Exceptions are the workspace memory of sums over many rows
and of convolutions, which is computed again.
The *peak* can't be extrapolated: it is the maximum of many lines, and which line is the maximum depends on the batch
size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from flexor.config.schema import TrainConfig
from flexor.plan.trace.events import Event, Trace
from flexor.plan.trace.ops import OVER_ROWS, Op
from flexor.plan.trace.trace import trace_loading
from flexor.plan.trace.workspaces import partial_sums, share_at_once

Number = TypeVar("Number", int, float)


class NotAlike(Exception):
    """The operations of a step depend on the batch size: each batch size must be traced separately."""


def rescale(low: Trace, high: Trace, batch_size: int, config: TrainConfig, *, costs: bool = True) -> Trace:
    """What `trace_step` would return for this batch size; without `costs`, only its memory."""
    if len(low.events) != len(high.events) or len(low.ops) != len(high.ops):
        raise NotAlike
    line = Line(low.batch_size, high.batch_size, batch_size)
    events = [line.event(a, b) for a, b in zip(low.events, high.events)]
    for at, event in enumerate(events):
        if event.what == "scratch" and _counted_anew(low.ops[event.op]):
            events[at] = event._replace(nbytes=line.op(low.ops[event.op], high.ops[event.op]).scratch)
    ops = [line.op(a, b) for a, b in zip(low.ops, high.ops)] if costs else low.ops
    scaled = replace(
        low,
        events=events,
        ops=ops,
        category=dict(low.category),
        batch_size=batch_size,
        inputs=line.shape(low.inputs, high.inputs),
    )
    return _load_anew(scaled, config)


def _counted_anew(op: Op) -> bool:
    """Whether its workspace memory does not grow linearly with the batch size."""
    return op.detail == OVER_ROWS or op.kind == "convolution"


class Line:
    """The linear extrapolation from two batch sizes."""

    def __init__(self, low: int, high: int, wanted: int):
        self.span, self.at = high - low, wanted - low

    def number(self, a: Number, b: Number) -> Number:
        value = a + (b - a) * self.at / self.span
        return round(value) if isinstance(a, int) else value

    def event(self, a: Event, b: Event) -> Event:
        if a[0] != b[0] or a.storage != b.storage or a.op != b.op:
            raise NotAlike
        return a if a.nbytes == b.nbytes else a._replace(nbytes=self.number(a.nbytes, b.nbytes))

    def op(self, a: Op, b: Op) -> Op:
        if a.name != b.name:
            raise NotAlike
        if a.read == b.read and a.written == b.written and a.flops == b.flops:
            return a
        scaled = replace(
            a,
            flops=self.number(float(a.flops), float(b.flops)),
            read=self.number(a.read, b.read),
            written=self.number(a.written, b.written),
            scratch=self.number(a.scratch, b.scratch),
            extent=self.shape(a.extent, b.extent),
            shapes=tuple(self.shape(x, y) for x, y in zip(a.shapes, b.shapes)),
        )
        if a.detail == OVER_ROWS:
            scaled.scratch = partial_sums(scaled)
        elif a.kind == "convolution":
            scaled.scratch = round(scaled.scratch * share_at_once(scaled))
        return scaled

    def shape(self, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.number(x, y) for x, y in zip(a, b))


def _load_anew(trace: Trace, config: TrainConfig) -> Trace:
    """Trace the loading again: it processes a batch in pieces of a fixed size. This takes milliseconds."""
    loading = trace_loading(config, trace.batch_size, trace.accumulation)
    for step in reversed(range(len(trace.steps))):
        _splice(trace, step, loading)
    return trace


def _splice(trace: Trace, index: int, loading: list[Event]) -> None:
    """Replace a step's loading events with new ones."""
    step = trace.steps[index]
    old = trace.events[step.start : step.loaded]
    kept = iter(_left(old))
    left = set(_left(loading))
    names: dict[int, int] = {}
    unused = max(trace.category) + 1
    more = []  # batches of additional passes, which are freed together with the others
    for event in loading:
        if event.what == "born":
            number = next(kept, None) if event.storage in left else None
            if number is None:
                number = unused + event.storage
                more += [number] if event.storage in left else []
            names[event.storage] = number
            trace.category[number] = "batch"
    first = old[0].op if old else 0
    last = old[-1].op if old else 0
    new = [e._replace(storage=names.get(e.storage, 0), op=min(first + e.op, last)) for e in loading]
    trace.events[step.end : step.end] = [
        Event("dies", number, 0, trace.events[step.end - 1].op) for number in more
    ]
    trace.events[step.start : step.loaded] = new
    loaded = step.loaded + len(new) - len(old)
    by = len(new) - len(old) + len(more)
    later = [
        replace(s, start=s.start + by, loaded=s.loaded + by, end=s.end + by) for s in trace.steps[index + 1 :]
    ]
    changed = replace(step, loaded=loaded, end=step.end + by)
    trace.steps = [*trace.steps[:index], changed, *later]


def _left(events: list[Event]) -> list[int]:
    """Storages that are allocated and not freed."""
    dead = {event.storage for event in events if event.what == "dies"}
    return [event.storage for event in events if event.what == "born" and event.storage not in dead]
