"""The buckets in which GPUs exchange gradients: which gradients are in each, and when in a backward pass it is full."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch

from flexor.plan.trace.events import ReadyGradient

BUCKET = 25 << 20  # bytes; a larger gradient is a bucket of its own


class Bucket(NamedTuple):
    """Gradients of one type that are exchanged together."""

    op: int
    """The operation after which it is full."""
    gradients: tuple[ReadyGradient, ...]

    @property
    def nbytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients)


def fill_buckets(ready: Iterable[ReadyGradient], limit: int = BUCKET) -> list[Bucket]:
    """The buckets of gradients in the order in which they become ready; the bucket that is full first comes first."""
    filling: dict[torch.dtype, list[ReadyGradient]] = defaultdict(list)
    full: list[Bucket] = []

    def close(dtype: torch.dtype) -> None:
        if gradients := filling.pop(dtype, None):
            full.append(Bucket(gradients[-1].op, tuple(gradients)))

    for gradient in ready:
        if sum(each.nbytes for each in filling[gradient.dtype]) + gradient.nbytes > limit:
            close(gradient.dtype)
        filling[gradient.dtype].append(gradient)
    for dtype in [*filling]:
        close(dtype)
    return sorted(full, key=lambda bucket: bucket.op)
