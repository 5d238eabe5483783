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
from flexor.plan.trace.events import Event, Trace, unfreed
from flexor.plan.trace.ops import OVER_ROWS, Op
from flexor.plan.trace.trace import trace_loading
from flexor.plan.trace.workspaces import partial_sums, share_at_once

Number = TypeVar("Number", int, float)


class OperationsDiffer(Exception):
    """The operations of a step depend on the batch size: each batch size must be traced separately."""


def rescale(low: Trace, high: Trace, batch_size: int, config: TrainConfig, *, costs: bool = True) -> Trace:
    """What `trace_step` would return for this batch size; without `costs`, only its memory."""
    if len(low.events) != len(high.events) or len(low.ops) != len(high.ops):
        raise OperationsDiffer
    line = LinearExtrapolation(low.batch_size, high.batch_size, batch_size)
    events = [line.event(a, b) for a, b in zip(low.events, high.events)]
    for at, event in enumerate(events):
        op = low.ops[event.op]
        if event.kind == "scratch" and (op.detail == OVER_ROWS or op.kind == "convolution"):
            # workspace memory that does not grow linearly
            events[at] = event._replace(nbytes=line.op(op, high.ops[event.op]).scratch)
    ops = [line.op(a, b) for a, b in zip(low.ops, high.ops)] if costs else low.ops
    inputs, category = line.shape(low.inputs, high.inputs), dict(low.category)
    steps = [replace(step) for step in low.steps]
    scaled = replace(
        low, events=events, ops=ops, steps=steps, category=category, batch_size=batch_size, inputs=inputs
    )
    # a batch is loaded in pieces of a fixed size: tracing this again takes milliseconds
    loading = trace_loading(config, batch_size, scaled.accumulation, scaled.features)
    for step in reversed(range(len(scaled.steps))):
        _splice(scaled, step, loading)
    return scaled


class LinearExtrapolation:
    """The linear extrapolation from two batch sizes."""

    def __init__(self, low: int, high: int, batch_size: int):
        self.span, self.at = high - low, batch_size - low

    def number(self, a: Number, b: Number) -> Number:
        value = a + (b - a) * self.at / self.span
        return round(value) if isinstance(a, int) else value

    def event(self, a: Event, b: Event) -> Event:
        if a.kind != b.kind or a.storage != b.storage or a.op != b.op:
            raise OperationsDiffer
        return a if a.nbytes == b.nbytes else a._replace(nbytes=self.number(a.nbytes, b.nbytes))

    def op(self, a: Op, b: Op) -> Op:
        if a.name != b.name:
            raise OperationsDiffer
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


def _splice(trace: Trace, index: int, loading: list[Event]) -> None:
    """Replace a step's loading events with new ones."""
    step = trace.steps[index]
    old = trace.events[step.start : step.loaded]
    old_batches, batches = iter(unfreed(old)), set(unfreed(loading))
    storages: dict[int, int] = {}  # of the new events -> in the trace
    unused = max(trace.category) + 1
    additional = []  # batches of additional passes, which are freed together with the others
    for event in loading:
        if event.kind == "alloc":
            number = next(old_batches, None) if event.storage in batches else None
            if number is None:
                number = unused + event.storage
                additional += [number] if event.storage in batches else []
            storages[event.storage] = number
            trace.category[number] = "batch"
    first, last = (old[0].op, old[-1].op) if old else (0, 0)
    new = [e._replace(storage=storages.get(e.storage, 0), op=min(first + e.op, last)) for e in loading]
    op = trace.events[step.end - 1].op
    trace.events[step.end : step.end] = [Event("free", number, 0, op) for number in additional]
    trace.events[step.start : step.loaded] = new
    loaded = len(new) - len(old)
    total = loaded + len(additional)
    step.loaded, step.end = step.loaded + loaded, step.end + total
    for later in trace.steps[index + 1 :]:
        later.start, later.loaded, later.end = later.start + total, later.loaded + total, later.end + total
