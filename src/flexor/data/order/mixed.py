"""The order of samples from several parts, such as datasets, in given shares: a pure function, like every order.

Each position of a run belongs to one part, and each part has an order of its own, in which the run's n-th sample of
that part is looked up. So a part has its own epochs, and the whole state is still one position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from flexor.data.order.order import SampleOrder, Selection, UnitSamples

__all__ = ["MixedOrder", "OrderPart", "Shares", "share_counts"]

ROUND = 1 << 16
"""Positions after which the sequence of parts repeats: shares are exact to one part in so many."""


def share_counts(weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """Positions of each part in a round, in proportion to the weights [K]; at least one each.

    Integers whose sum fits in a round are kept as they are, but for common factors: shares are exact then.
    """
    weights = np.asarray(weights, np.float64)
    assert len(weights) and np.isfinite(weights).all() and (weights > 0).all()
    counts = weights.astype(np.int64)
    if (counts != weights).any() or counts.sum() > ROUND:
        exact = weights / weights.sum() * ROUND
        counts = np.maximum(1, exact.astype(np.int64))
        missing = max(0, ROUND - int(counts.sum()))
        # the largest remainders get what is missing
        largest = np.argsort(counts - exact, kind="stable")[:missing]
        counts[largest] += 1
    return counts // np.gcd.reduce(counts)


class Shares:
    """Which part each position belongs to: parts alternate as evenly as their counts allow."""

    def __init__(self, counts: Sequence[int] | np.ndarray):
        """`counts` [K]: positions of each part in a round."""
        self.counts = np.asarray(counts, np.int64)
        self.round = int(self.counts.sum())
        part = np.repeat(np.arange(len(self.counts)), self.counts)
        time = np.concatenate([(np.arange(count) + 0.5) / count for count in self.counts.tolist()])
        self.part = part[np.lexsort((part, time))]  # [round]
        self._places = [np.flatnonzero(self.part == number) for number in range(len(self.counts))]

    def count_before(self, part: int, position: int) -> int:
        """How many of the positions before this one belong to the part."""
        rounds, rest = divmod(position, self.round)
        return rounds * int(self.counts[part]) + int(np.searchsorted(self._places[part], rest))

    def position(self, part: int, numbers: np.ndarray) -> np.ndarray:
        """The positions of the part's samples [n], which are counted from 0 since the start of the run."""
        rounds, rest = np.divmod(numbers, self.counts[part])
        return rounds * self.round + self._places[part][rest]


@dataclass(frozen=True, eq=False)
class OrderPart:
    """Some samples of the whole, and the order in which they come among themselves."""

    samples: np.ndarray  # [n] their numbers in the whole
    order: SampleOrder  # of range(n)


class MixedOrder(SampleOrder):
    """Parts in given shares. Lanes are those of the first part, then those of the second, and so on.

    A batch is sorted by lane. How many of its samples come from a part may differ by one or two from batch to batch, so
    with several ranks the lanes at the borders of their slices are read by two of them.
    """

    def __init__(self, parts: Sequence[OrderPart], shares: Shares):
        assert len(parts) == len(shares.counts)
        self.parts, self.shares = list(parts), shares
        self.size = sum(len(part.samples) for part in parts)
        lanes = [part.order.lanes for part in parts]
        self.lanes = sum(lanes)
        pieces = [part.order.pieces for part in parts]
        self.pieces = sum(pieces)
        self._first_lane, self._first_piece = np.cumsum([0, *lanes]), np.cumsum([0, *pieces])  # [K + 1]

    def select(self, position: int, count: int, batches: int = 1) -> Selection:
        selections, stop = [], position + count * batches
        for number, part in enumerate(self.parts):
            first, end = (self.shares.count_before(number, at) for at in (position, stop))
            if end > first:
                selection = part.order.select(first, end - first)
                lane, unit = selection.lane, selection.unit
                selections.append(
                    replace(
                        selection,
                        position=self.shares.position(number, selection.position),
                        sample=part.samples[selection.sample],
                        lane=np.where(lane < 0, -1, lane + self._first_lane[number]),
                        unit=np.where(unit < 0, -1, unit + self._first_piece[number]),
                    )
                )
        joined = Selection.join(selections)
        batch = (joined.position - position) // count
        return joined[np.lexsort((joined.position, joined.lane, batch))]

    def samples_of(self, epoch: int, units: np.ndarray) -> UnitSamples:
        """`epoch` is that of the part."""
        of_parts: list[UnitSamples] = []
        edges = np.searchsorted(units, self._first_piece)
        for number, (first, end) in enumerate(pairwise(edges.tolist())):
            if end > first:
                part = self.parts[number]
                samples = part.order.samples_of(epoch, units[first:end] - self._first_piece[number])
                positions = self.shares.position(number, samples.position)
                of_parts.append(UnitSamples(part.samples[samples.sample], positions, samples.edges))
        return UnitSamples.join(of_parts)

    def counts_before(self, position: int) -> list[int]:
        """How many samples of each part come before a position."""
        return [self.shares.count_before(number, position) for number in range(len(self.parts))]
