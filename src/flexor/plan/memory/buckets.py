"""The buckets in which GPUs exchange gradients, as `train.engine.exchange` fills them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from flexor.plan.trace.events import ReadyGradient
from flexor.train.engine.exchange import ALIGNED, BUCKET_BYTES


@dataclass(frozen=True)
class PlannedBucket:
    """Gradients that are exchanged together."""

    op: int
    """The operation after which it and all buckets before it are full."""
    gradients: tuple[ReadyGradient, ...]

    @property
    def nbytes(self) -> int:
        return sum(-(-gradient.exchanged_nbytes // ALIGNED) * ALIGNED for gradient in self.gradients)

    @property
    def in_place(self) -> bool:
        """Whether its gradient is exchanged where it is, without a copy."""
        return len(self.gradients) == 1 and self.gradients[0].can_stay


def fill_buckets(ready: Iterable[ReadyGradient], limit: int = BUCKET_BYTES) -> list[PlannedBucket]:
    """The buckets of gradients that become ready in this order, in the order in which they are exchanged."""
    filling: dict[torch.dtype, list[ReadyGradient]] = defaultdict(list)
    groups: list[list[ReadyGradient]] = []
    for gradient in ready:
        group = filling[gradient.exchanged_dtype]
        if group and sum(each.exchanged_nbytes for each in group) + gradient.exchanged_nbytes > limit:
            groups.append(group)
            group = filling[gradient.exchanged_dtype] = []
        group.append(gradient)
    groups += filling.values()
    buckets, op = [], -1
    for group in groups:
        op = max(op, *(gradient.op for gradient in group))
        buckets.append(PlannedBucket(op, tuple(group)))
    return buckets
