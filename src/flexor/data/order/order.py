"""The global sample order: which samples make up batch n, as a pure function.

The only state is a position. A permutation of any number of samples is computed when needed (a Feistel
network, applied until the value is inside the range). So an order over a billion frames takes no memory,
and every rank, worker or resumed run computes the same order.

There are two orders: uniform, for frames that are cached, and streaming. Streaming decodes each unit of
video (see decode_units.py) once per epoch and keeps only some units in memory at a time. In exchange it
shuffles slightly less well; shuffle_quality.py measures how much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from flexor.core.rng import key_of, mix_in_place, mix_numpy
from flexor.data.order.decode_units import Units

__all__ = [
    "Permutation",
    "Permutations",
    "SampleOrder",
    "Selection",
    "StreamOnceOrder",
    "StreamingOrder",
    "UniformOrder",
    "UnitSamples",
]

ROUNDS = 6
GOLDEN = (5**0.5 - 1) / 2
"""Any number of consecutive multiples of the golden ratio, modulo 1, are spread evenly."""
BLOCK = 4096
"""Positions computed at a time: the overhead of a numpy call equals the cost of a few hundred samples."""


class SampleOrder:
    """Which samples make up a global batch. Positions count samples since the start of the run."""

    size: int
    lanes = 0
    """Number of lanes; 0 if the order is uniform."""
    pieces = 0
    """Number of pieces of units, which `select` numbers from 0; 0 if the order is uniform."""

    def samples(self, position: int, count: int) -> np.ndarray:
        """The samples [count] of the global batch at positions position ... position + count - 1."""
        return self.select(position, count).sample

    def select(self, position: int, count: int, batches: int = 1) -> Selection:
        """The same samples in the same order, and where they come from; of several global batches, one after the
        other: many at once cost little more than one."""
        raise NotImplementedError

    def samples_of(self, epoch: int, units: np.ndarray) -> UnitSamples:
        """All samples of some pieces of units [N], ascending, as `select` numbers them."""
        raise NotImplementedError

    def epoch(self, position: int) -> float:
        """How many times the data has been seen at this position."""
        return position / self.size


@dataclass(frozen=True, eq=False)
class Selection:
    """Some samples of the order, [n] each; lane, pool and unit are -1 if the order is uniform."""

    position: np.ndarray
    sample: np.ndarray
    epoch: np.ndarray
    lane: np.ndarray
    pool: np.ndarray  # number of the pool in its lane and epoch
    unit: np.ndarray  # number of the piece of a unit: the same in all epochs

    def __len__(self) -> int:
        return len(self.sample)

    def __getitem__(self, index: slice | np.ndarray) -> Selection:
        return Selection(*(array[index] for array in vars(self).values()))

    @staticmethod
    def join(parts: Sequence[Selection]) -> Selection:
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(vars(part).values() for part in parts))
        return Selection(*map(np.concatenate, columns))


@dataclass(frozen=True, eq=False)
class UnitSamples:
    """The samples of some pieces of units. Those of the k-th are at edges[k] to edges[k + 1]."""

    sample: np.ndarray  # [n]
    position: np.ndarray  # [n] where each is used
    edges: np.ndarray  # [N + 1]

    @staticmethod
    def join(parts: Sequence[UnitSamples]) -> UnitSamples:
        count = np.concatenate([np.diff(part.edges) for part in parts])
        samples, positions = ([getattr(part, name) for part in parts] for name in ("sample", "position"))
        return UnitSamples(np.concatenate(samples), np.concatenate(positions), np.append(0, np.cumsum(count)))


class Permutation:
    """A pseudo-random bijection of range(size), evaluated at any positions."""

    def __init__(self, size: int, *key: object):
        assert size > 0
        self.size = size
        self.bits = np.uint64(_half_bits(size))
        self.keys = [np.uint64(key_of(*key, round_)) for round_ in range(ROUNDS)]

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """positions [n] in range(size) -> [n], each value of range(size) at exactly one position."""
        values = _feistel(np.asarray(positions, np.uint64), self.bits, self.keys)
        while (outside := values >= self.size).any():  # the domain is at most four times the range
            values[outside] = _feistel(values[outside], self.bits, self.keys)
        return values.astype(np.int64)


class Permutations:
    """Pseudo-random bijections of many ranges, each with a size and a uint64 key, both [K]."""

    def __init__(self, sizes: np.ndarray, keys: np.ndarray):
        self._sizes = sizes.astype(np.uint64)
        self._bits = (1 + np.searchsorted(4 ** np.arange(1, 32), sizes)).astype(np.uint64)  # as _half_bits
        self._keys = [mix_numpy(keys + np.uint64(key_of("round", round_))) for round_ in range(ROUNDS)]

    def __call__(self, numbers: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """offsets[i] in the range of that number, permuted; both [n]."""
        return self._apply(_feistel, numbers, offsets)

    def inverse(self, numbers: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """The offsets that are permuted to these."""
        return self._apply(_feistel_inverse, numbers, offsets)

    def _apply(
        self, bijection: Callable[..., np.ndarray], numbers: np.ndarray, offsets: np.ndarray
    ) -> np.ndarray:
        """A bijection of a power of four, applied until the values are in range."""
        values = np.array(offsets, np.uint64)
        places, rest = np.arange(len(values)), values
        while len(places):
            rest = bijection(rest, self._bits[numbers], [key[numbers] for key in self._keys])
            values[places] = rest
            outside = np.flatnonzero(rest >= self._sizes[numbers])
            places, rest, numbers = places[outside], rest[outside], numbers[outside]
        return values.astype(np.int64)


def _half_bits(size: int) -> int:
    """Bits of each half of the Feistel network; together they cover at least `size`."""
    return max(1, ((size - 1).bit_length() + 1) // 2)


def _feistel(
    x: np.ndarray, bits: np.ndarray | np.uint64, keys: Sequence[np.ndarray | np.uint64]
) -> np.ndarray:
    mask = (np.uint64(1) << bits) - np.uint64(1)
    left, right = x >> bits, x & mask
    for key in keys:
        left ^= mix_in_place(right + key) & mask
        left, right = right, left
    return (left << bits) | right


def _feistel_inverse(x: np.ndarray, bits: np.ndarray, keys: Sequence[np.ndarray]) -> np.ndarray:
    mask = (np.uint64(1) << bits) - np.uint64(1)
    left, right = x >> bits, x & mask
    for key in reversed(keys):
        right ^= mix_in_place(left + key) & mask
        left, right = right, left
    return (left << bits) | right


class UniformOrder(SampleOrder):
    """Every sample once per epoch, in a full permutation that differs from epoch to epoch.

    A batch may span the end of an epoch, so every batch is full and the whole state is one integer.
    """

    def __init__(self, size: int, seed: int):
        self.size = size
        self.seed = seed
        # a step is planned long before its batch is made: each may be in two blocks
        self._block = lru_cache(maxsize=4)(self._block_samples)

    def samples(self, position: int, count: int) -> np.ndarray:
        parts: list[np.ndarray] = []
        while count:
            epoch, offset = divmod(position, self.size)
            parts.append(self._block(epoch, offset // BLOCK)[offset % BLOCK :][:count])
            position, count = position + len(parts[-1]), count - len(parts[-1])
        return np.concatenate(parts)

    def select(self, position: int, count: int, batches: int = 1) -> Selection:
        count *= batches
        positions = np.arange(position, position + count)
        none = np.full(count, -1)
        return Selection(positions, self.samples(position, count), positions // self.size, none, none, none)

    def _block_samples(self, epoch: int, number: int) -> np.ndarray:
        """The samples at BLOCK positions of an epoch (fewer at its end), in order."""
        offsets = np.arange(number * BLOCK, min((number + 1) * BLOCK, self.size))
        return Permutation(self.size, "order", self.seed, epoch)(offsets)


class StreamingOrder(SampleOrder):
    """Every sample once per epoch, unit by unit: each unit is decoded once, when its pool is next.

    All units are placed in a random line, which is split into lanes of equal numbers of samples (a unit at a
    split becomes two pieces). Each epoch permutes the pieces of each lane, splits them into pools of about
    `pool` samples (at most a quarter plus one unit more), and permutes the samples of each pool. Position
    p of an epoch is taken from lane p % lanes. So about lanes * pool samples are in memory at a time,
    and a global batch that is a multiple of `lanes` takes the same number of samples from each lane.

    Lanes do not depend on the number of ranks. A batch is sorted by lane: a rank's (or micro-batch's) slice
    of the batch comes from the same lanes in every batch, except in the batch that spans the end of an epoch.

    Memory grows with the number of units, not of samples.
    """

    def __init__(self, units: Units, seed: int, *, lanes: int, pool: int):
        assert lanes > 0 and pool > 0 and units.size > 0
        self.size = units.size
        self.seed = seed
        self.lanes = lanes
        self.pool = pool
        self._units = units
        # The samples of an epoch's line are those of lane 0, then lane 1 and so on; lane l starts at _bounds[l].
        sizes = [self.size // lanes + (lane < self.size % lanes) for lane in range(lanes)]
        self._bounds = np.cumsum([0, *sizes])
        line = Permutation(len(units), "line", seed)(np.arange(len(units)))  # [U]
        ends = np.cumsum(units.count[line])
        edges = np.union1d(np.append(ends, 0), self._bounds)  # [P + 1]
        place = np.searchsorted(ends, edges[:-1], side="right")  # [P] each piece's place in the line
        self._piece_unit = line[place]
        self._piece_skip = edges[:-1] - (ends - units.count[line])[place]  # samples of its unit before it
        self._piece_count = np.diff(edges)
        self.pieces = len(place)
        self._lane_pieces = np.searchsorted(edges, self._bounds)  # [lanes + 1]
        self._pool_bounds = np.concatenate([self._bounds, *map(self._pool_cuts, range(lanes))])
        self._table = lru_cache(maxsize=2)(self._epoch_table)  # this epoch and the next
        self._block = lru_cache(maxsize=2)(self._block_selection)

    def select(self, position: int, count: int, batches: int = 1) -> Selection:
        """Positions position ... position + count - 1, sorted by lane; and the same of the batches that follow."""
        parts: list[Selection] = []
        rest = count * batches
        while rest:
            epoch, offset = divmod(position, self.size)
            parts.append(self._block(epoch, offset // BLOCK)[offset % BLOCK :][:rest])
            position, rest = position + len(parts[-1]), rest - len(parts[-1])
        selection = Selection.join(parts)
        in_batch = selection.lane + np.repeat(np.arange(batches) * self.lanes, count)
        return selection[np.argsort(in_batch, kind="stable")]

    def pools(self, epoch: int, lane: int) -> int:
        """The number of pools of a lane in this epoch."""
        first = self._table(epoch).lane_pools
        return int(first[lane + 1] - first[lane])

    def samples_of(self, epoch: int, units: np.ndarray) -> UnitSamples:
        table, count = self._table(epoch), self._piece_count[units]
        edges = np.append(0, np.cumsum(count))
        k = np.arange(edges[-1]) - np.repeat(edges[:-1], count)
        begin = table.piece_edges[table.places[units]]  # in the epoch's line
        pool = np.repeat(np.searchsorted(table.pool_edges, begin, side="right") - 1, count)
        first = table.pool_edges[pool]
        offsets = first + table.in_pool.inverse(pool, np.repeat(begin, count) + k - first)
        lane = np.repeat(np.searchsorted(self._lane_pieces, units, side="right") - 1, count)
        position = epoch * self.size + (offsets - self._bounds[lane]) * self.lanes + lane
        skip, unit = (np.repeat(column[units], count) for column in (self._piece_skip, self._piece_unit))
        return UnitSamples(self._units.sample_at(unit, skip + k), position, edges)

    def _block_selection(self, epoch: int, number: int) -> Selection:
        """BLOCK positions of an epoch (fewer at its end), in order."""
        offsets = np.arange(number * BLOCK, min((number + 1) * BLOCK, self.size))
        index, lane = np.divmod(offsets, self.lanes)
        table = self._table(epoch)
        sample, unit, pool = self._look_up(table, self._bounds[lane] + index)
        position = epoch * self.size + offsets
        pool = pool - table.lane_pools[lane]
        return Selection(position, sample, np.full_like(lane, epoch), lane, pool, unit)

    def _look_up(self, table: _EpochTable, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sample, piece and pool (numbered over all lanes) at spots [n] of an epoch's line."""
        pool = np.searchsorted(table.pool_edges, offsets, side="right") - 1
        first = table.pool_edges[pool]
        offsets = first + table.in_pool(pool, offsets - first)
        place = np.searchsorted(table.piece_edges, offsets, side="right") - 1
        piece = table.pieces[place]
        k = self._piece_skip[piece] + offsets - table.piece_edges[place]
        return self._units.sample_at(self._piece_unit[piece], k), piece, pool

    def _pool_cuts(self, lane: int) -> np.ndarray:
        """Where the lane's pools should end; a pool actually ends with the unit at that position.

        The pools are equal, but shifted by a fraction that differs from lane to lane. So lanes move to their
        next pools at different times. A small remainder at either end joins its neighbour.
        """
        size = int(self._bounds[lane + 1] - self._bounds[lane])
        pieces = int(self._lane_pieces[lane + 1] - self._lane_pieces[lane])
        count = min(-(-size // self.pool), pieces)
        if count < 2:
            return np.empty(0, np.int64)
        cuts = (np.arange(count) + 1 - lane * GOLDEN % 1) * (size / count)
        remainder = size / count / 4
        cuts = cuts[(cuts > remainder) & (cuts < size - remainder)]
        return self._bounds[lane] + cuts.astype(np.int64)

    def _epoch_table(self, epoch: int) -> _EpochTable:
        key = np.array([key_of("streaming", self.seed, epoch)], np.uint64)
        in_lane = np.diff(self._lane_pieces)
        lane = np.repeat(np.arange(self.lanes), in_lane)  # [P]
        first = self._lane_pieces[:-1][lane]
        lane_keys = mix_numpy(key + np.arange(self.lanes, dtype=np.uint64))
        pieces = first + Permutations(in_lane, lane_keys)(lane, np.arange(len(lane)) - first)
        edges = np.append(0, np.cumsum(self._piece_count[pieces]))
        pool_places = np.unique(np.searchsorted(edges, self._pool_bounds))  # [Q + 1]
        places = np.empty_like(pieces)
        places[pieces] = np.arange(len(pieces))
        pool_edges = edges[pool_places]
        pool_keys = mix_numpy(mix_numpy(key) + np.arange(len(pool_places) - 1, dtype=np.uint64))
        return _EpochTable(
            pieces=pieces,
            places=places,
            piece_edges=edges,
            pool_edges=pool_edges,
            in_pool=Permutations(np.diff(pool_edges), pool_keys),
            lane_pools=np.searchsorted(pool_places, self._lane_pieces),
        )


@dataclass(frozen=True, eq=False)
class _EpochTable:
    """One epoch's line: the sequence of unit pieces, and the bounds of its pools."""

    pieces: np.ndarray  # [P] piece at each place of the line
    places: np.ndarray  # [P] place of each piece
    piece_edges: np.ndarray  # [P + 1] samples before it
    pool_edges: np.ndarray  # [Q + 1] samples before each pool
    in_pool: Permutations  # of the samples of each pool
    lane_pools: np.ndarray  # [lanes + 1] pools before each lane


class StreamOnceOrder(SampleOrder):
    """Epoch 0 in streaming order, later epochs in another order: for frames that the first epoch caches."""

    def __init__(self, streaming: StreamingOrder, later: SampleOrder):
        assert streaming.size == later.size
        self.size = streaming.size
        self.streaming = streaming
        self.later = later
        self.lanes = max(streaming.lanes, later.lanes)
        self.pieces = streaming.pieces

    def select(self, position: int, count: int, batches: int = 1) -> Selection:
        streamed = max(0, min(batches, (self.size - position) // count))  # batches of the first epoch
        parts = [self.streaming.select(position, count, streamed)] if streamed else []
        position, batches = position + streamed * count, batches - streamed
        if batches and position < self.size:  # a batch of both
            rest = self.size - position
            parts += [self.streaming.select(position, rest), self._select_later(self.size, count - rest, 1)]
            position, batches = position + count, batches - 1
        if batches:
            parts.append(self._select_later(position, count, batches))
        return Selection.join(parts)

    def _select_later(self, position: int, count: int, batches: int) -> Selection:
        later = self.later.select(position, count, batches)
        return replace(later, unit=np.full(len(later), -1))  # nothing is decoded after the first epoch

    def samples_of(self, epoch: int, units: np.ndarray) -> UnitSamples:
        return self.streaming.samples_of(epoch, units)
