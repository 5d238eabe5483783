"""How long GPUs exchange gradients (DDP), and which part of it a step waits for.

Gradients are copied into buckets in the order in which the backward pass computes them. A bucket is summed over all
GPUs as soon as it is full and the link is free, while the backward pass goes on. What is not sent by its end is
exposed.

Not modelled: while NCCL sums, it takes some of the GPU's multiprocessors and memory bandwidth from the backward pass.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from flexor.plan.memory.buckets import PlannedBucket, fill_buckets
from flexor.plan.trace.events import Trace
from flexor.plan.trace.ops import HOST_PER_TENSOR, TENSORS_PER_KERNEL, Op
from flexor.train.engine.exchange import LARGE

COPY = "copy_"  # the operation whose measured speed that of a copy into a bucket is
# Host time of an eager step, relative to a common operation: the hook of each gradient, and to start and await the sum
# of a bucket. Assumed.
HOST_OF_HOOK, HOST_OF_SUM = 0.5, 5.0


class Sent(NamedTuple):
    """A bucket on its way."""

    ready: float
    """Seconds from the beginning of the backward pass until it is full."""
    nbytes: int


class Traffic(NamedTuple):
    """Seconds of a step."""

    communication: float
    exposed: float
    """The part of `communication` that the step waits for."""


NO_TRAFFIC = Traffic(0.0, 0.0)


def traffic(buckets: Iterable[Sent], backward: float, seconds: Callable[[float], float]) -> Traffic:
    """The exchange of buckets in the order in which they are full, over one link, beside a backward pass.

    `seconds`: how long the link takes for that many bytes.
    """
    total = free = 0.0
    for bucket in buckets:
        needed = seconds(bucket.nbytes)
        total += needed
        free = max(free, bucket.ready) + needed
    return Traffic(total, max(0.0, free - backward))


@functools.lru_cache(maxsize=32)
def packing(trace: Trace) -> tuple[tuple[PlannedBucket, Op], ...]:
    """The buckets of a step, each with the operation that copies gradients into it, if any have to be copied."""
    return tuple((bucket, _copy(bucket)) for bucket in fill_buckets(trace.steps[-1].ready))


def _copy(bucket: PlannedBucket) -> Op:
    tensors, read = len(bucket.gradients), sum(gradient.nbytes for gradient in bucket.gradients)
    op = Op(COPY, "memory", "backward", 0, read, bucket.nbytes, bucket.gradients[0].dtype)
    large = sum(
        gradient.dtype != gradient.exchanged_dtype and gradient.numel >= LARGE
        for gradient in bucket.gradients
    )
    op.kernels = large - (large - tensors) // TENSORS_PER_KERNEL
    op.host = large + max(2.0, HOST_PER_TENSOR * (tensors - large))
    if bucket.in_place:
        op.read, op.written, op.kernels, op.host = 0, 0, 0, 0.0
    op.host += HOST_OF_HOOK * tensors + HOST_OF_SUM
    return op


def last_backward(trace: Trace) -> Iterator[tuple[int, Op]]:
    """The operations of the last backward pass, each with its index in the trace."""
    ops = trace.ops
    end = max((index for index, op in enumerate(ops, 1) if op.phase == "backward"), default=0)
    begin = end
    while begin > 0 and ops[begin - 1].phase == "backward":
        begin -= 1
    return zip(range(begin, end), ops[begin:end], strict=True)


def sent(trace: Trace, seconds: Callable[[Op], float]) -> tuple[list[Sent], float]:
    """When each bucket of a step is full, and how long its last backward pass takes; `seconds` of each operation."""
    copies: dict[int, list[tuple[PlannedBucket, Op]]] = defaultdict(list)
    for bucket, op in packing(trace):
        copies[bucket.op].append((bucket, op))
    now, full = 0.0, []
    for index, op in last_backward(trace):
        now += seconds(op)
        for bucket, copy in copies.get(index, ()):
            now += seconds(copy)
            full.append(Sent(now, bucket.nbytes))
    return full, now
