"""The order of samples from several parts: shares, epochs of each part, and the same from any position."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_order import runs

from flexor.data.order.mixed import ROUND, MixedOrder, OrderPart, Shares, share_counts
from flexor.data.order.order import StreamingOrder, StreamOnceOrder, UniformOrder

weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


@given(weights)
def test_counts_are_in_proportion(given_weights):
    counts = share_counts(given_weights)
    shares = np.array(given_weights) / sum(given_weights)
    assert (counts >= 1).all() and counts.sum() <= ROUND + len(counts)
    assert np.abs(counts / counts.sum() - shares).max() <= 2 * len(counts) / ROUND


def test_counts_of_integers_are_exact():
    assert share_counts([43, 38]).tolist() == [43, 38]
    assert share_counts([1, 1, 2]).tolist() == [1, 1, 2]
    assert share_counts([0.5, 0.5]).tolist() == [1, 1]
    assert share_counts([1e9, 1]).tolist() == [ROUND - 1, 1]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 1000), st.integers(1, 200))
def test_every_position_belongs_to_one_part_and_numbers_lead_back(counts, position, length):
    shares = Shares(counts)
    positions = []
    for part in range(len(counts)):
        first, end = shares.count_before(part, position), shares.count_before(part, position + length)
        positions.append(shares.position(part, np.arange(first, end)))
        # never far from its share, in any stretch
        assert abs((end - first) - length * counts[part] / sum(counts)) < len(counts) + 1
    assert sorted(np.concatenate(positions).tolist()) == [*range(position, position + length)]


def mixed(sizes, counts, kind, seed=3):
    parts, first = [], 0
    for number, size in enumerate(sizes):
        streaming = StreamingOrder(
            runs([3] * (size // 3) + [size % 3] * (size % 3 > 0)), seed + number, lanes=2, pool=5
        )
        uniform = UniformOrder(size, seed + number)
        order = {"uniform": uniform, "streaming": streaming, "cached": StreamOnceOrder(streaming, uniform)}[
            kind
        ]
        parts.append(OrderPart(np.arange(first, first + size), order))
        first += size
    return MixedOrder(parts, Shares(counts))


sizes_and_counts = st.lists(st.tuples(st.integers(3, 60), st.integers(1, 9)), min_size=1, max_size=4)
kinds = st.sampled_from(["uniform", "streaming", "cached"])


@given(sizes_and_counts, kinds, st.integers(1, 30))
@settings(max_examples=40)
def test_each_part_has_each_sample_once_in_each_of_its_epochs(parts, kind, batch):
    sizes, counts = zip(*parts)
    order = mixed(sizes, counts, kind)
    steps = 3 * sum(counts) * max(sizes) // batch // min(counts) + 1
    picks = [order.select(step * batch, batch) for step in range(min(steps, 60))]
    sample, epoch = (np.concatenate([getattr(p, name) for p in picks]) for name in ("sample", "epoch"))
    first = 0
    for number, size in enumerate(sizes):
        mask = (sample >= first) & (sample < first + size)
        assert mask.sum() == order.counts_before(len(picks) * batch)[number]
        for each in range(mask.sum() // size):  # its complete epochs
            assert sorted(sample[mask & (epoch == each)]) == [*range(first, first + size)]
        first += size


@given(sizes_and_counts, kinds, st.integers(0, 300), st.integers(1, 6), st.integers(1, 5))
@settings(max_examples=40)
def test_any_split_of_a_batch_and_any_start_give_the_same_samples(parts, kind, step, ranks, share):
    sizes, counts = zip(*parts)
    batch = ranks * share
    picks_of_all = mixed(sizes, counts, kind).select(step * batch, batch)
    again = mixed(sizes, counts, kind)
    again.select(0, 7)  # what was asked before changes nothing
    assert np.array_equal(again.samples(step * batch, batch), picks_of_all.sample)
    assert np.array_equal(np.sort(picks_of_all.position), np.arange(step * batch, (step + 1) * batch))
    pieces = np.concatenate([mixed(sizes, counts, kind).samples(step * batch + i, 1) for i in range(batch)])
    assert np.array_equal(np.sort(pieces), np.sort(picks_of_all.sample))


@given(sizes_and_counts, st.integers(1, 20))
@settings(max_examples=30)
def test_units_say_where_their_samples_come(parts, batch):
    """What the loader decodes with a unit is what later batches read."""
    sizes, counts = zip(*parts)
    order = mixed(sizes, counts, "streaming")
    for step in range(5):
        picks = order.select(step * batch, batch)
        for epoch in np.unique(picks.epoch).tolist():
            in_epoch = picks[picks.epoch == epoch]
            units = np.unique(in_epoch.unit)
            samples = order.samples_of(epoch, units)
            unit = np.repeat(units, np.diff(samples.edges))
            assert set(in_epoch.position.tolist()) <= set(samples.position.tolist())
            for sample, position, number in list(zip(samples.sample, samples.position, unit))[::5]:
                at = order.select(int(position), 1)
                assert (at.sample[0], at.unit[0], at.epoch[0]) == (sample, number, epoch)


@given(sizes_and_counts, st.integers(1, 20), st.sampled_from(["streaming", "uniform", "cached"]))
@settings(max_examples=20)
def test_batches_together_are_the_batches_one_by_one(parts, batch, kind):
    sizes, counts = zip(*parts)
    order = mixed(sizes, counts, kind)
    together = order.select(3 * batch, batch, 7)
    alone = [order.select(step * batch, batch) for step in range(3, 10)]
    for name in ("position", "sample", "epoch", "lane", "unit"):
        assert np.array_equal(getattr(together, name), np.concatenate([getattr(a, name) for a in alone]))


def test_weights_decide_how_often():
    order = mixed([30, 30], share_counts([3, 1]), "uniform")
    assert order.counts_before(400) == [300, 100]
    assert order.epoch(60) == 1
    with pytest.raises(AssertionError):
        share_counts([1, 0])
