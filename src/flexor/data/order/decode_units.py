"""Decode units: samples that are decoded together. Every sample belongs to exactly one unit.

Decoding one frame of a video means decoding its group of pictures (GOP). So samples are streamed in units
that use all frames decoded for them. A unit is a run of neighbouring samples. For windows whose steps have
a fixed stride, a unit is the samples of one phase of that stride: their windows use the same few frames.

Small units shuffle better; large units decode fewer frames twice at their borders. The trade-off: of all
splits tried, take the smallest units that decode at most a tenth more frames than the cheapest split.
The cost of a split is counted on some of the episodes, not estimated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from flexor.core.rng import mix_numpy

__all__ = ["Units", "build_units", "decoded_per_sample"]

TOLERANCE = 1.1
"""Largest number of decoded frames, relative to the cheapest split."""
GROWTH = 1.5
"""Factor from one run length that is tried to the next."""
TRIAL_EPISODES, TRIAL_ROWS = 32, 10_000
"""How much of a dataset is used to try splits."""
COUNTED_SAMPLES = 20_000
"""Number of samples whose units `decoded_per_sample` counts."""
STRETCH = 20
"""Phases of an episode longer than this many windows are split; each split decodes one window again."""


@dataclass(frozen=True, eq=False)
class Units:
    """Samples that are decoded together. The k-th sample of unit u is first + (k // run) * stride + k % run."""

    first: np.ndarray  # [U] the unit's first sample
    count: np.ndarray  # [U] its number of samples
    run: np.ndarray  # [U] number of neighbouring samples in a run
    stride: np.ndarray  # [U] from the start of one run to the start of the next

    def __len__(self) -> int:
        return len(self.first)

    @property
    def size(self) -> int:
        """Number of samples; each is in exactly one unit."""
        return int(self.count.sum())

    def samples(self, unit: int) -> np.ndarray:
        """All samples of one unit, ascending."""
        k = np.arange(self.count[unit])
        return self.sample_at(np.full_like(k, unit), k)

    def sample_at(self, units: np.ndarray, k: np.ndarray) -> np.ndarray:
        """The k-th sample of each unit; both arrays [n]."""
        block, rest = np.divmod(k, self.run[units])
        return self.first[units] + block * self.stride[units] + rest


def build_units(
    lengths: np.ndarray,
    starts: Sequence[np.ndarray],
    deltas: Sequence[Sequence[int]],
    *,
    rows: np.ndarray | None = None,
    least: int = 1,
    most: int | None = None,
) -> Units:
    """Split all samples into units of about `least` to `most` samples that decode few frames twice.

    Episode e has rows[e] rows (default: lengths[e]); the first lengths[e] of them start a sample.
    All rows of all episodes are numbered consecutively, [R], in the order of the samples.
    starts[c][i] is the first row that camera c must decode to get the frame of row i: never before the
    row's own episode, never decreasing inside an episode; i itself if decoding can start there. deltas[c]
    are the steps of camera c's window relative to the current row; outside the episode, its first or last row
    is used.

    A run is never split inside the longest GOPs, even if it then exceeds `most`.
    """
    table = _Episodes.of(lengths, rows, starts, deltas)
    trial = table.trial_subset()
    candidates = list(_candidate_splits(trial, int(table.lengths.max()), least, most or table.size))
    trial_units = [split(trial) for split in candidates]
    costs = [trial.decoded(units) / units.size for units in trial_units]
    acceptable = [i for i, cost in enumerate(costs) if cost <= TOLERANCE * min(costs)]
    return candidates[max(acceptable, key=lambda i: len(trial_units[i]))](table)


def decoded_per_sample(
    units: Units,
    lengths: np.ndarray,
    starts: Sequence[np.ndarray],
    deltas: Sequence[Sequence[int]],
    *,
    rows: np.ndarray | None = None,
) -> float:
    """Frames decoded per sample and camera if each unit is decoded once, separately.

    The count is exact for a small dataset, and uses randomly drawn units for a large one.
    """
    table = _Episodes.of(lengths, rows, starts, deltas)
    unit_ids = np.arange(len(units))
    if units.size > COUNTED_SAMPLES:
        unit_ids = np.argsort(mix_numpy(unit_ids.astype(np.uint64) + np.uint64(1)))
        unit_ids = unit_ids[: 1 + np.searchsorted(np.cumsum(units.count[unit_ids]), COUNTED_SAMPLES)]
    frames = table.decoded(units, unit_ids)
    return frames / int(units.count[unit_ids].sum()) / len(table.starts)


@dataclass(frozen=True, eq=False)
class _Episodes:
    """The checked arguments of `build_units`, with derived values."""

    lengths: np.ndarray  # [E] samples
    rows: np.ndarray  # [E]
    starts: list[np.ndarray]  # per camera [R]
    deltas: list[np.ndarray]  # per camera [D]
    first_sample: np.ndarray  # [E]
    first_row: np.ndarray  # [E]

    @classmethod
    def of(
        cls,
        lengths: np.ndarray,
        rows: np.ndarray | None,
        starts: Sequence[np.ndarray],
        deltas: Sequence[Sequence[int]],
    ) -> _Episodes:
        lengths = np.asarray(lengths, np.int64)
        rows = lengths if rows is None else np.asarray(rows, np.int64)
        assert lengths.sum() > 0 and (lengths <= rows).all()
        assert len(starts) == len(deltas) > 0 and all(len(start) == rows.sum() for start in starts)
        return cls(
            lengths=lengths,
            rows=rows,
            starts=[np.asarray(start) for start in starts],
            deltas=[np.asarray(delta, np.int64) for delta in deltas],
            first_sample=np.cumsum(lengths) - lengths,
            first_row=np.cumsum(rows) - rows,
        )

    @property
    def size(self) -> int:
        return int(self.lengths.sum())

    def trial_subset(self) -> _Episodes:
        """A few episodes spread over the dataset; only the start of very long ones."""
        usable = np.flatnonzero(self.lengths)
        episodes = usable[np.linspace(0, len(usable) - 1, min(len(usable), TRIAL_EPISODES)).astype(np.int64)]
        rows = np.minimum(self.rows[episodes], TRIAL_ROWS)
        episodes = episodes[: max(1, int(np.searchsorted(np.cumsum(rows), TRIAL_ROWS, side="right")))]
        rows = rows[: len(episodes)]
        # from a row's index in the selection to that in the dataset
        shifts = self.first_row[episodes] - (np.cumsum(rows) - rows)
        slices = [slice(first, first + n) for first, n in zip(self.first_row[episodes], rows)]
        return _Episodes.of(
            np.minimum(self.lengths[episodes], rows),
            rows,
            [np.concatenate([start[s] - m for s, m in zip(slices, shifts)]) for start in self.starts],
            [delta.tolist() for delta in self.deltas],
        )

    def decoded(self, units: Units, unit_ids: np.ndarray | None = None) -> int:
        """Frames that all cameras decode for all (or these) units, each unit separately."""
        unit_ids = np.arange(len(units)) if unit_ids is None else unit_ids
        counts = units.count[unit_ids]
        unit = np.repeat(unit_ids, counts)
        sample = units.sample_at(unit, np.arange(len(unit)) - np.repeat(np.cumsum(counts) - counts, counts))
        episode = np.searchsorted(self.first_sample, sample, side="right") - 1
        low = self.first_row[episode]
        high = low + self.rows[episode] - 1
        row_now = low + sample - self.first_sample[episode]
        total = 0
        for start, delta in zip(self.starts, self.deltas):
            row = np.clip(row_now[:, None] + delta, low[:, None], high[:, None])  # [samples, D]
            # In each GOP that a unit uses, frames are decoded from its start to the last used frame.
            unit_of, row = np.divmod(np.unique(unit[:, None] * len(start) + row), len(start))
            last = np.append((np.diff(unit_of) != 0) | (np.diff(start[row]) != 0), True)
            total += int((row[last] - start[row[last]] + 1).sum())
        return total

    def cuts(self) -> list[np.ndarray]:
        """Samples at which runs may start, the sparsest list first: where all cameras start a GOP, and
        where the camera with the longest GOPs starts one. One list if they are the same."""
        begins = [start == np.arange(len(start)) for start in self.starts]
        shared = np.logical_and.reduce(begins)
        longest = min(begins, key=np.count_nonzero)
        masks = [shared] if np.array_equal(shared, longest) else [shared, longest]
        return [self._samples_of(np.flatnonzero(mask)) for mask in masks]

    def _samples_of(self, rows: np.ndarray) -> np.ndarray:
        """The samples that start at these rows; always includes the first sample of every episode."""
        rows = np.union1d(rows, self.first_row[self.lengths > 0])
        episode = np.searchsorted(self.first_row, rows, side="right") - 1
        frame = rows - self.first_row[episode]
        return (self.first_sample[episode] + frame)[frame < self.lengths[episode]]


def _candidate_splits(
    trial: _Episodes, longest: int, least: int, most: int
) -> Iterator[Callable[[_Episodes], Units]]:
    """Ways to split episodes into units that are tried."""
    gop = 1
    for number, cuts in enumerate(trial.cuts()):
        gop = max(1, int(np.median(np.diff(np.append(cuts, trial.size)))))
        for length in _run_lengths(gop, min(longest, max(most, least)), least):
            yield partial(_runs, number=number, length=length)
    spans = [delta.max() - delta.min() for delta in trial.deltas]
    stride = int(np.gcd.reduce(np.concatenate([delta - delta[0] for delta in trial.deltas])))
    for width in _widths(gop, stride):
        stretch = max(1, min(STRETCH * int(max(spans)) // stride, most // width)) * stride
        if least <= width * float(np.median(trial.lengths)) / stride:
            yield partial(_phases, stride=stride, width=width, stretch=stretch)


def _run_lengths(gop: int, longest: int, least: int) -> list[int]:
    lengths, length = {least, longest}, float(gop)
    while length < longest:
        lengths.add(max(least, math.ceil(length)))
        length *= GROWTH
    return sorted(lengths)


def _widths(gop: int, stride: int) -> list[int]:
    """Phase widths to try: one GOP, two GOPs, and fractions of the stride."""
    if stride < 2:
        return []
    widths = {gop * 2**power for power in range(stride.bit_length())}
    widths |= {math.ceil(stride / part) for part in range(1, 9)}
    return sorted(width for width in widths if width < stride)


def _runs(table: _Episodes, number: int, length: int) -> Units:
    """Runs of at least `length` neighbouring samples, except at the end of an episode."""
    edges = np.append(table.cuts()[number], table.size)
    first_items = np.searchsorted(edges, np.append(table.first_sample, table.size))
    first = edges[_cut_runs(edges, first_items, length)]
    count = np.diff(np.append(first, table.size))
    return Units(first, count, run=count, stride=count)


def _phases(table: _Episodes, stride: int, width: int, stretch: int) -> Units:
    """Samples whose rows are in the same `width` rows modulo the stride, in about `stretch` rows of an episode."""
    parts = np.maximum(1, table.lengths // stretch)
    rows = (
        -(-table.lengths // (parts * stride)) * stride
    )  # of all stretches but an episode's last: whole strides
    parts = -(-table.lengths // np.maximum(rows, 1))
    episode = np.repeat(np.arange(len(parts)), parts)
    begin = (np.arange(len(episode)) - np.repeat(np.cumsum(parts) - parts, parts)) * rows[episode]
    length = np.minimum(rows[episode], table.lengths[episode] - begin)  # [stretches]
    offset = np.arange(0, stride, width)  # [phases]
    run = np.broadcast_to(np.minimum(width, stride - offset), (len(length), len(offset)))
    full_strides, rest = np.divmod(length, stride)
    count = full_strides[:, None] * run + np.clip(rest[:, None] - offset, 0, run)
    first = (table.first_sample[episode] + begin)[:, None] + offset
    nonempty = count > 0
    return Units(first[nonempty], count[nonempty], run[nonempty], np.full(int(nonempty.sum()), stride))


def _cut_runs(edges: np.ndarray, groups: np.ndarray, least: int) -> np.ndarray:
    """Group consecutive items into runs; returns the items at which runs start.

    Item i covers edges[i] to edges[i + 1]; group g is items groups[g] to groups[g + 1] - 1. A run continues
    until it covers `least`, or to the end of its group. A remainder there of less than half of `least`
    joins the previous run.
    """
    count = len(edges) - 1
    group_first = np.repeat(groups[:-1], np.diff(groups))
    group_end = np.repeat(groups[1:], np.diff(groups))
    following = np.minimum(np.searchsorted(edges, edges[:-1] + least), group_end).tolist()
    run_starts, item = [], 0
    while item < count:
        run_starts.append(item)
        item = following[item]
    begins = np.array(run_starts, np.int64)
    covered = np.diff(edges[np.append(begins, count)])
    at_end = np.append(begins[1:], count) == group_end[begins]
    too_short = at_end & (2 * covered < least) & (begins != group_first[begins])
    return begins[~too_short]
