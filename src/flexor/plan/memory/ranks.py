"""The trace of one process among several, made from that of one process alone.

DDP moves gradients to the buckets in which they are exchanged. FSDP keeps a shard of what it shares out, and gathers a
block's weights while they compute.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

from flexor.config.schema import ParallelConfig
from flexor.plan.memory.buckets import PlannedBucket, fill_buckets
from flexor.plan.trace.events import Category, Event, StepEvents, Trace

# Sharded by FSDP.
IN_PARTS: tuple[Category, ...] = ("weights", "gradients", "optimizer", "ema")


CACHED = 32  # traces: those of one job on all GPUs


@functools.lru_cache(maxsize=CACHED)
def with_buckets(trace: Trace, kept_by_graph: bool) -> Trace:
    """DDP: when the gradients of a bucket are ready, they are copied there and freed; the optimizer reads the bucket.

    `kept_by_graph`: the exchange is outside of the graph, so a graph's buckets stay where they are.
    """
    category: dict[int, Category] = dict(trace.category)
    numbers, exchanged = count(max(category) + 1), set[int]()

    def change(events: list[Event], step: StepEvents | None) -> list[Event]:
        if step is None:
            return events
        buckets = fill_buckets(step.ready)
        copied = {next(numbers): bucket for bucket in buckets if not bucket.in_place}
        category.update(dict.fromkeys(copied, "gradients"))
        exchanged.update(copied)
        in_place = (bucket.gradients[0].storage for bucket in buckets if bucket.in_place)
        exchanged.update(storage for storage in in_place if storage is not None)
        return _packed(events, copied)

    packed = _rewritten(trace, [], change, category)
    return replace(packed, kept_by_graph=frozenset(exchanged)) if kept_by_graph else packed


def _packed(events: list[Event], buckets: dict[int, PlannedBucket]) -> list[Event]:
    """The events of a step with these buckets, by the number of their storage."""
    full = [*buckets.items()]
    # Storages that the trace has not freed yet, by bucket. A storage may hold gradients of several buckets.
    unfreed_in = {number: {gradient.storage for gradient in bucket.gradients} for number, bucket in full}
    packed_into: dict[int | None, list[int]] = defaultdict(list)
    for number, storages in unfreed_in.items():
        for storage in storages:
            packed_into[storage].append(number)
    out: list[Event] = []
    for event in events:
        while full and event.op > full[0][1].op:
            number, bucket = full.pop(0)
            out.append(Event("alloc", number, bucket.nbytes, bucket.op))
            last = (s for s in unfreed_in[number] if s is not None and packed_into[s][-1] == number)
            out += [Event("free", storage, 0, bucket.op) for storage in last]
        if event.kind != "free" or event.storage not in packed_into:
            out.append(event)
            continue
        for number in packed_into[event.storage]:
            unfreed_in[number].discard(event.storage)
            if not unfreed_in[number]:
                out.append(event._replace(storage=number))
    return out


@functools.lru_cache(maxsize=CACHED)
def sharded(trace: Trace, shards: int, parallel: ParallelConfig, half: bool) -> Trace:
    """FSDP: a shard of each weight, its gradient and its state. `half`: the run computes in a lower precision.

    In addition to the shards: blocks are gathered while they compute, and their gradients are reduced afterwards, see
    `_blocks`. The rest of the policy outside of blocks stays gathered. Weights are gathered in the lower precision,
    which replaces autocast's copies. With accumulation, gradients stay whole, in float32, until the last pass.
    """
    category: dict[int, Category] = dict(trace.category)
    numbers = count(max(category) + 1)
    rest = next(numbers)
    category[rest] = "weights"
    on_host: tuple[Category, ...] = ("weights", "gradients", "optimizer") if parallel.cpu_offload else ()

    def change(events: list[Event], step: StepEvents | None) -> list[Event]:
        blocks = _blocks(trace, step, parallel, half, numbers, category) if step else []
        computed = sum(gradient.nbytes for gradient in step.ready) if step else 0
        gradients = trace.gradients / computed if computed else 1  # more where bfloat16 copies got them
        share = dict.fromkeys(IN_PARTS, 1 / shards)
        share["gradients"] *= gradients if trace.accumulation == 1 else gradients * shards
        share |= dict.fromkeys(on_host, 0)
        out = []
        for event in events:
            while blocks and event.op > blocks[0].op:
                out.append(blocks.pop(0))
            name = trace.category.get(event.storage)
            if name in IN_PARTS and event.kind == "alloc":
                event = event._replace(nbytes=math.ceil(event.nbytes * share[name]))
            if name != "casts":
                out.append(event)
        return out + blocks

    return _rewritten(trace, [Event("alloc", rest, trace.units[-1].gathered(half), 0)], change, category)


def _blocks(
    trace: Trace,
    step: StepEvents,
    parallel: ParallelConfig,
    half: bool,
    numbers: Iterator[int],
    category: dict[int, Category],
) -> list[Event]:
    """When a step gathers the weights of blocks, and reduces their gradients over the ranks.

    Two blocks are gathered at a time: one computes while the next is on its way. The forward pass ends with the blocks
    that the backward pass starts with; what it gathers earlier meets fewer activations. When a block's backward pass
    has ended, its gradients are copied into a float32 buffer, which is reduced while the next block computes.
    """
    rest = trace.units[-1]
    end_of = {gradient.unit: gradient.op for gradient in step.ready}
    order = [trace.units[unit] for unit in sorted(end_of, key=end_of.__getitem__)]
    weights = [0 if unit is rest else unit.gathered(half) for unit in order]
    gathered = [sum(weights[i : i + 2]) for i in range(len(order))]
    frozen = sorted((unit.gathered(half) for unit in trace.units[:-1] if not unit.trained), reverse=True)
    gathered[:1] = [max([*gathered[:1], sum(frozen[:2])])]
    if not parallel.reshard_after_forward:
        gathered = [sum(unit.gathered(half) for unit in trace.units[:-1])] * len(order)
    reduced = [0, *(4 * unit.trained for unit in order)]
    gradients = [*(unit.gradients(half) for unit in order), 0]
    start = next(event.op for event in trace.events[step.loaded : step.end] if event.op >= 0)
    ends = sorted(end_of.values())
    ends += [ends[-1] + 1]
    events = []
    for since, end, *sizes in zip([start, *ends], ends, [*gathered, 0], map(sum, zip(reduced, gradients))):
        storages = [next(numbers), next(numbers)]
        category.update(zip(storages, ("weights", "gradients")))
        events += [Event("alloc", storage, size, since) for storage, size in zip(storages, sizes)]
        events += [Event("free", storage, 0, end) for storage in storages]
    return events


def _rewritten(
    trace: Trace,
    added: list[Event],
    change: Callable[[list[Event], StepEvents | None], list[Event]],
    category: dict[int, Category],
) -> Trace:
    """The trace with events added at the end of the build phase, and `change` applied to every part.

    `change` gets the step of the events that compute it; None for those that build and load.
    """
    events = [*change(trace.events[: trace.built], None), *added]
    built, steps = len(events), []
    for step in trace.steps:
        start = len(events)
        events += change(trace.events[step.start : step.loaded], None)
        loaded = len(events)
        events += change(trace.events[step.loaded : step.end], step)
        steps.append(replace(step, start=start, loaded=loaded, end=len(events)))
    return replace(trace, events=events, category=category, built=built, steps=steps)
