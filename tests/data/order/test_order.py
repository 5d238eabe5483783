"""The order of samples: every one once per epoch, from any position, at no cost in memory."""

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexor.data.order.decode_units import Units, build_units
from flexor.data.order.order import (
    BLOCK,
    Permutation,
    Permutations,
    StreamingOrder,
    StreamOnceOrder,
    UniformOrder,
)
from flexor.data.order.shuffle_quality import shuffle_quality


def runs(counts):
    """Units of neighbouring samples."""
    count = np.array(counts, np.int64)
    return Units(np.cumsum(count) - count, count, count, count)


@st.composite
def units(draw):
    """Runs of any lengths, or one unit of all even and one of all odd samples."""
    if draw(st.booleans()):
        return runs(draw(st.lists(st.integers(1, 40), min_size=1, max_size=40)))
    size = draw(st.integers(2, 300))
    first, ones = np.array([0, 1]), np.array([1, 1])
    return Units(first, np.array([(size + 1) // 2, size // 2]), ones, 2 * ones)


lanes_and_pools = st.tuples(st.integers(1, 20), st.integers(1, 200))


@given(st.integers(1, 5000), st.integers() | st.text())
@settings(max_examples=30)
def test_permutation_is_a_bijection(size, key):
    permutation = Permutation(size, key)
    values = permutation(np.arange(size))
    assert np.array_equal(np.sort(values), np.arange(size))
    some = np.arange(0, size, 7)
    assert np.array_equal(permutation(some), values[some])  # each position by itself


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 65_537])
def test_sizes_around_powers_of_two(size):
    assert len(set(Permutation(size, 0)(np.arange(size)).tolist())) == size


def test_permutations_look_shuffled_and_differ_by_key():
    first, second = (Permutation(10_000, "order", 1, epoch)(np.arange(10_000)) for epoch in (0, 1))
    assert (first == second).sum() < 20 and (first == np.arange(10_000)).sum() < 20
    assert abs(np.corrcoef(first, np.arange(10_000))[0, 1]) < 0.04
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.04


@given(st.integers(1, 300), st.integers(1, 50), st.integers(0, 2**40), st.integers(1, 4))
@settings(max_examples=20)
def test_every_sample_once_per_epoch_whatever_the_batch(size, batch, seed, epochs):
    order = UniformOrder(size, seed)
    batches = [order.samples(start, batch) for start in range(0, size * epochs, batch)]
    samples = np.concatenate(batches)[: size * epochs]
    assert all(len(b) == batch for b in batches)  # full across the end of an epoch
    for epoch in samples.reshape(epochs, size):
        assert np.array_equal(np.sort(epoch), np.arange(size))


@given(st.integers(1, 300), st.integers(0, 2000), st.integers(1, 400), st.integers(0, 400))
@settings(max_examples=20)
def test_positions_mean_the_same_wherever_one_starts(size, start, count, skip):
    order = UniformOrder(size, 3)
    samples = order.samples(start, count + skip)
    assert np.array_equal(UniformOrder(size, 3).samples(start + skip, count), samples[skip:])


def test_seeds_and_epochs_differ():
    order = UniformOrder(1000, 1)
    first, second = order.samples(0, 1000), order.samples(1000, 1000)
    assert (first == second).sum() < 10
    assert (first == UniformOrder(1000, 2).samples(0, 1000)).sum() < 10
    assert order.epoch(1500) == 1.5


def test_a_trillion_samples_cost_nothing():
    tracemalloc.start()
    order = UniformOrder(10**12, 0)
    samples = order.samples(7 * 10**12 - 50, 100)  # across the end of the seventh epoch
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    assert len(set(samples.tolist())) >= 99 and samples.min() >= 0 and samples.max() < 10**12


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2**64 - 1)), min_size=1, max_size=8))
@settings(max_examples=30)
def test_many_permutations_at_once_are_bijections(ranges):
    ranges = list({key: (size, key) for size, key in ranges}.values())
    offsets = np.concatenate([np.arange(size) for size, _ in ranges])
    sizes = np.concatenate([np.full(size, size) for size, _ in ranges])
    keys = np.concatenate([np.full(size, key, np.uint64) for size, key in ranges])
    permutations, numbers = Permutations(sizes, keys), np.arange(len(sizes))
    values = permutations(numbers, offsets)
    assert np.array_equal(permutations.inverse(numbers, values), offsets)
    for _, key in ranges:
        group = values[keys == np.uint64(key)]
        assert np.array_equal(np.sort(group), np.arange(len(group)))
    assert np.array_equal(permutations(numbers[::-3], offsets[::-3]), values[::-3])


@given(units(), lanes_and_pools, st.integers(1, 70), st.integers(0, 2**40))
@settings(max_examples=20)
def test_streaming_gives_every_sample_once_per_epoch(units, lanes_and_pool, batch, seed):
    lanes, pool = lanes_and_pool
    order = StreamingOrder(units, seed, lanes=lanes, pool=pool)
    for epoch in (0, 1, 5):
        positions = range(epoch * order.size, (epoch + 1) * order.size, batch)
        end = (epoch + 1) * order.size
        samples = np.concatenate([order.samples(p, min(batch, end - p)) for p in positions])
        assert np.array_equal(np.sort(samples), np.arange(order.size))
    across = order.select(order.size - 1, order.size + 1)  # from the end of one epoch through the next
    assert np.array_equal(np.sort(across.sample[across.epoch == 1]), np.arange(order.size))
    assert np.array_equal(np.sort(across.position), np.arange(order.size - 1, 2 * order.size))


@given(units(), lanes_and_pools, st.integers(0, 3))
@settings(max_examples=30)
def test_units_are_what_the_batches_take(units, lanes_and_pool, epoch):
    """The loader decodes by units and delivers by batches: both must tell the same story."""
    lanes, pool = lanes_and_pool
    order = StreamingOrder(units, 7, lanes=lanes, pool=pool)
    picks = order.select(epoch * order.size, order.size)
    samples = order.samples_of(epoch, np.arange(order.pieces))
    assert samples.edges[-1] == order.size and (np.diff(samples.edges) > 0).all()
    unit = np.repeat(np.arange(order.pieces), np.diff(samples.edges))
    by_position = np.argsort(samples.position)
    in_order = np.argsort(picks.position)
    assert np.array_equal(samples.position[by_position], picks.position[in_order])
    assert np.array_equal(samples.sample[by_position], picks.sample[in_order])
    assert np.array_equal(unit[by_position], picks.unit[in_order])
    part = order.samples_of(epoch, np.arange(order.pieces)[1::2])
    assert np.array_equal(np.sort(part.position), np.sort(samples.position[unit % 2 == 1]))
    pools, sizes = np.unique(np.stack([picks.lane, picks.pool]), axis=1, return_counts=True)
    assert [order.pools(epoch, lane) for lane in range(lanes)] == np.bincount(
        pools[0], minlength=lanes
    ).tolist()
    assert sizes.max() <= 1.25 * max(pool, units.count.max()) + units.count.max()
    pool_of_unit = dict(zip(picks.unit.tolist(), zip(picks.lane.tolist(), picks.pool.tolist())))
    # a piece of a unit is decoded for one pool only
    assert [pool_of_unit[u] for u in picks.unit.tolist()] == list(
        zip(picks.lane.tolist(), picks.pool.tolist())
    )
    # A unit is split at the borders of lanes only, and its pieces are the same in every epoch.
    assert len(pool_of_unit) <= len(units.count) + lanes - 1
    other = order.select((epoch + 1) * order.size, order.size)
    same = dict(zip(other.sample.tolist(), zip(other.unit.tolist(), other.lane.tolist())))
    assert same == dict(zip(picks.sample.tolist(), zip(picks.unit.tolist(), picks.lane.tolist())))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_ranks_keep_to_their_lanes(world, accumulation):
    """24 lanes, a global batch of 48: ranks are slices of it, so whatever their number it is the same batch."""
    order = StreamingOrder(runs([7] * 400), 3, lanes=24, pool=64)
    lanes_of: list[set[int]] = [set() for _ in range(world)]
    for step in range(order.size * 3 // 48):
        picks = order.select(step * 48, 48)
        if len(set(picks.epoch.tolist())) > 1:
            continue  # spans the end of an epoch
        micro = 48 // accumulation // world
        for rank, lanes in enumerate(lanes_of):
            mine = picks[rank * micro * accumulation : (rank + 1) * micro * accumulation]
            lanes |= set(mine.lane.tolist())
    assert [sorted(lanes) for lanes in lanes_of] == np.arange(24).reshape(world, -1).tolist()


@given(units(), lanes_and_pools, st.permutations(range(8)))
@settings(max_examples=12)
def test_streaming_is_a_pure_function_of_the_position(units, lanes_and_pool, steps):
    """Resumed anywhere, asked in any order, by another instance: the same batches."""
    lanes, pool = lanes_and_pool
    order, batch = StreamingOrder(units, 5, lanes=lanes, pool=pool), 32
    starts = [step * batch * 97 for step in steps]  # over many epochs of these small datasets
    selections = [order.select(start, batch) for start in starts]
    for start, picks in zip(starts[::-1], selections[::-1]):
        again = StreamingOrder(units, 5, lanes=lanes, pool=pool).select(start, batch)
        for name in ("position", "sample", "epoch", "lane", "pool", "unit"):
            assert np.array_equal(getattr(again, name), getattr(picks, name))
        assert np.array_equal(order.samples(start, batch), picks.sample)


@pytest.mark.parametrize("size", [1, 5, 4095, 4096, 4097])
def test_blocks_of_positions_leave_no_seam(size):
    order = StreamingOrder(runs([1] * size), 0, lanes=3, pool=100)
    picks = order.select(0, 2 * size + 200)
    by_position = picks.sample[np.argsort(picks.position)]
    for start in (0, size - 1, 2 * size, 2 * size + 136):
        part = order.select(start, 64)
        assert np.array_equal(part.sample[np.argsort(part.position)], by_position[start : start + 64])


def test_a_pool_of_everything_is_uniform_inside_of_a_lane():
    order = StreamingOrder(runs([100] * 40), 1, lanes=4, pool=1000)
    assert [order.pools(0, lane) for lane in range(4)] == [1] * 4
    delivered = order.select(0, order.size)
    delivered = delivered[delivered.lane == 0]
    rank_of = np.argsort(np.argsort(delivered.sample))
    assert abs(np.corrcoef(rank_of, np.arange(1000))[0, 1]) < 0.1
    assert abs(np.corrcoef(rank_of[:-1], rank_of[1:])[0, 1]) < 0.1


def test_seeds_and_epochs_stream_differently():
    order, other = (StreamingOrder(runs([5] * 200), seed, lanes=4, pool=100) for seed in (1, 2))
    assert (order.samples(0, 1000) == order.samples(1000, 1000)).sum() < 40
    assert (order.samples(0, 1000) == other.samples(0, 1000)).sum() < 40
    lane_of, other_lane_of = (
        p.lane[np.argsort(p.sample)] for p in (order.select(0, 1000), other.select(0, 1000))
    )
    assert (lane_of == other_lane_of).mean() < 0.4  # a seed deals the units, too
    assert order.epoch(1500) == 1.5


def test_lanes_come_to_their_next_pools_at_different_times():
    order = StreamingOrder(runs([2] * 32_000), 0, lanes=32, pool=200)
    pools = [order.select(start, 32).pool for start in range(0, order.size, 32)]
    changes = [int((before != after).sum()) for before, after in pairwise(pools)]
    assert max(changes) <= 6  # of 32
    per_rank = np.add.reduceat(np.array([b != a for b, a in pairwise(pools)]).sum(0), range(0, 32, 8))
    assert per_rank.max() - per_rank.min() <= 8  # and every rank has its share of them


def test_streaming_costs_memory_by_units_not_samples():
    units = runs([10**9] * 1000)
    tracemalloc.start()
    order = StreamingOrder(units, 0, lanes=16, pool=512)
    samples = order.samples(7 * 10**12 - 32, 64)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000
    assert len(set(samples.tolist())) >= 63 and samples.min() >= 0 and samples.max() < 10**12


@given(units(), st.integers(1, 90), st.integers(0, 400))
@settings(max_examples=25)
def test_streaming_once_then_uniform(units, batch, position):
    streaming = StreamingOrder(units, 1, lanes=4, pool=50)
    uniform = UniformOrder(units.size, 1)
    order = StreamOnceOrder(streaming, uniform)
    picks = order.select(position, batch)
    assert np.array_equal(picks.sample, order.samples(position, batch))
    assert np.array_equal(np.sort(picks.position), np.arange(position, position + batch))
    assert np.array_equal(picks.unit >= 0, picks.epoch == 0)
    late = picks.epoch > 0
    assert (picks.lane[late] == -1).all() and (picks.pool[late] == -1).all()
    if late.all():
        assert np.array_equal(picks.sample, uniform.samples(position, batch))
    if not late.any():
        assert np.array_equal(picks.sample, streaming.samples(position, batch))
    together, alone = (
        order.select(position, batch, 3),
        [order.select(position + n * batch, batch) for n in range(3)],
    )
    for name in ("position", "sample", "epoch", "lane", "pool", "unit"):
        assert np.array_equal(getattr(together, name), np.concatenate([getattr(one, name) for one in alone]))
    assert np.array_equal(np.sort(order.samples(0, units.size)), np.arange(units.size))
    assert np.array_equal(np.sort(order.samples(units.size, units.size)), np.arange(units.size))


class InOrder(UniformOrder):
    """No shuffle at all."""

    def samples(self, position, count):
        return np.arange(position, position + count) % self.size


EPISODES, FRAMES, BATCH, FPS = 400, 300, 64, 30


def quality(order):
    episode = np.repeat(np.arange(EPISODES), FRAMES)
    return shuffle_quality(order, episode, np.arange(EPISODES * FRAMES), BATCH, FPS, batches=60)


def streaming_quality(gop, deltas, lanes, buffered):
    lengths = np.full(EPISODES, FRAMES)
    starts = np.arange(lengths.sum()) // gop * gop  # GOPs divide the episodes here
    units = build_units(lengths, [starts], [deltas])
    return quality(StreamingOrder(units, 1, lanes=lanes, pool=buffered // lanes))


def test_quality_knows_the_extremes():
    uniform, in_order = quality(UniformOrder(EPISODES * FRAMES, 1)), quality(InOrder(EPISODES * FRAMES, 1))
    assert uniform.episodes == pytest.approx(uniform.episodes_uniform, abs=0.5)
    assert uniform.near == pytest.approx(uniform.near_uniform, abs=0.6)
    assert uniform.near_next == pytest.approx(uniform.near_next_uniform, abs=0.8)
    assert abs(uniform.correlation) < 0.05 and uniform.effective_batch > 62
    assert in_order.episodes < 2 and in_order.near > 1500 and in_order.near_next > 1500
    assert in_order.correlation > 0.99 and in_order.effective_batch < 2
    assert "episodes in a batch of 64" in str(uniform)


@pytest.mark.parametrize(
    ("gop", "deltas", "buffered"),
    [(2, [0], 4096), (30, [0], 8192), (2, list(range(-210, 1, 30)), 5120)],
    ids=["gop-2", "gop-30", "residues"],
)
@pytest.mark.parametrize("lanes", [8, 64])
def test_training_does_not_notice_the_streaming_shuffle(gop, deltas, buffered, lanes):
    """`held` samples in memory (2 to 4 GB of two cameras at 480x640), a batch of 64.

    Near-duplicates in a batch make its gradient noisier, as a smaller batch would be. With a lane for
    every sample of a batch it loses nothing (95 % for chance). With only 8 lanes, and long GOPs, it is
    worth at least 75 % of its size even if near-duplicates had the same gradient: noise 15 % above
    uniform in standard deviation, less than the choice between two usual batch sizes makes (41 %).
    Episodes are as many as in a uniform batch within 5 % and 15 %.

    Across batches a pool repeats itself: the pairs with the next batch stay under 20 of 4,096.
    """
    measured = streaming_quality(gop, deltas, lanes, buffered)
    one_each = lanes == BATCH
    assert measured.effective_batch > BATCH * (0.95 if one_each else 0.75)
    assert measured.episodes > measured.episodes_uniform * (0.95 if one_each else 0.85)
    assert measured.near_next < 20 + measured.near_next_uniform
    assert abs(measured.correlation) < 0.12


@pytest.mark.parametrize("size", [5, BLOCK, 3 * BLOCK + 17])
@pytest.mark.parametrize("count", [1, 64, 2 * BLOCK + 1])
def test_blocks_do_not_show(size, count):
    order = UniformOrder(size, seed=3)
    count = min(count, 100 * size)  # enough epochs
    positions = [*range(0, 2 * size, 1 + size // 10), size - 1, size - size % BLOCK]
    epochs = range(3 + count // size)
    expected = np.concatenate([Permutation(size, "order", 3, epoch)(np.arange(size)) for epoch in epochs])
    for position in positions:
        assert np.array_equal(order.samples(position, count), expected[position : position + count])
        assert np.array_equal(order.select(position, count).sample, expected[position : position + count])
