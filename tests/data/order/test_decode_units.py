"""Units: every sample in one, and what is decoded for them counted against a plain loop."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexor.data.order.decode_units import Units, build_units, decoded_per_sample

SARM = list(range(-210, 1, 30))
WINDOWS = [[0], [-1, 0], [0, 1, 2, 3], [-6, -3, 0], [-40, -20, 0], [-7, -2], [0, 4, 8]]


def gops(rows, gop):
    """starts of a camera whose GOPs have `gop` frames, beginning anew in every episode."""
    first = np.repeat(np.cumsum(rows) - rows, rows)
    frame = np.arange(sum(rows)) - first
    return first + frame // gop * gop


def uneven(rows, rng):
    """starts of a camera with key frames anywhere."""
    key = rng.random(sum(rows)) < rng.choice([0.03, 0.3, 1])
    key[np.cumsum(rows) - rows] = True
    return np.maximum.accumulate(np.where(key, np.arange(len(key)), 0))


def frames_decoded(unit_samples, lengths, rows, start, deltas):
    """Frames one camera decodes for these samples, in plain words: the sum over touched GOPs."""
    last_of_gop = {}
    for sample in unit_samples.tolist():
        episode = int(np.searchsorted(np.cumsum(lengths), sample, side="right"))
        low = int(rows[:episode].sum())
        now = low + sample - int(lengths[:episode].sum())
        for delta in deltas:
            row = min(max(now + delta, low), low + int(rows[episode]) - 1)
            gop = int(start[row])
            last_of_gop[gop] = max(last_of_gop.get(gop, gop), row)
    return sum(last - gop + 1 for gop, last in last_of_gop.items())


@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(0, 5)), min_size=1, max_size=6),
    st.lists(st.sampled_from(WINDOWS), min_size=1, max_size=2),
    st.integers(1, 12),
    st.none() | st.integers(12, 60),
    st.integers(0, 10**6),
)
@settings(max_examples=60)
def test_every_sample_is_in_one_unit_and_decoding_is_counted(episodes, deltas, least, most, seed):
    lengths = np.array([length for length, _ in episodes])
    rows = lengths + np.array([extra for _, extra in episodes])  # the last rows start no sample
    rng = np.random.default_rng(seed)
    starts = [uneven(rows, rng) for _ in deltas]
    units = build_units(lengths, starts, deltas, rows=rows, least=least, most=most)

    parts = [units.samples(unit) for unit in range(len(units))]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(lengths.sum()))
    assert units.size == lengths.sum() and (units.count > 0).all()
    episode = np.repeat(np.arange(len(lengths)), lengths)
    assert all(len(set(episode[part])) == 1 and (np.diff(part) > 0).all() for part in parts)

    counted = sum(frames_decoded(p, lengths, rows, s, d) for p in parts for s, d in zip(starts, deltas))
    expected = counted / lengths.sum() / len(starts)
    assert decoded_per_sample(units, lengths, starts, deltas, rows=rows) == pytest.approx(expected)


def test_single_frames_come_in_whole_gops():
    lengths = np.array([31, 7, 64])
    starts = [gops(lengths, 4), gops(lengths, 8)]
    units = build_units(lengths, starts, [[0], [0]])
    assert decoded_per_sample(units, lengths, starts, [[0], [0]]) == 1
    assert set(units.first.tolist()) == set(np.unique(starts[1]).tolist())  # the smallest that share GOPs


def test_cameras_that_share_no_gops_are_cut_at_the_longer_ones():
    lengths = np.array([300])
    row = np.arange(300)
    starts = [gops(lengths, 30), np.where(row < 3, 0, 3 + (row - 3) // 4 * 4)]  # 30 m is never 3 + 4 n
    units = build_units(lengths, starts, [[0], [0]])
    assert set(units.first.tolist()) == set(range(0, 300, 30))
    assert decoded_per_sample(units, lengths, starts, [[0], [0]]) < 1.1


def test_units_are_as_long_as_asked_for_and_leave_no_crumbs():
    lengths = np.array([100, 33, 5])
    units = build_units(lengths, [gops(lengths, 2)], [[0]], least=16)
    ends = np.cumsum(lengths)
    inner = ~np.isin(units.first + units.count, ends)
    assert (units.count[inner] == 16).all()
    assert units.count.tolist() == [16] * 5 + [20, 16, 17, 5]


@pytest.mark.parametrize("gop", [1, 2, 15, 30])
@pytest.mark.parametrize("deltas", [[-1, 0], list(range(16))], ids=["pairs", "chunks"])
def test_windows_of_neighbours_decode_little_twice(gop, deltas):
    lengths = np.full(8, 1200)
    units = build_units(lengths, [gops(lengths, gop)], [deltas])
    assert decoded_per_sample(units, lengths, [gops(lengths, gop)], [deltas]) <= 1.1
    assert units.count.max() < 800  # and are no longer than it takes: 10 times the longer of GOP and window


@pytest.mark.parametrize("gop", [1, 2, 3, 5, 10])
def test_windows_a_stride_apart_decode_each_gop_for_one_unit(gop):
    lengths = np.array([300, 450, 299])
    starts = gops(lengths, gop)
    units = build_units(lengths, [starts], [SARM])
    assert (
        decoded_per_sample(units, lengths, [starts], [SARM]) <= 1.1
    )  # eight frames per sample are delivered
    assert units.count.mean() < 300 / 30 * gop * 1.2
    assert (units.stride == 30).all()
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    # Which units need which GOP, but for the first of an episode: all repeat its first frame as padding.
    owners: dict[int, set[int]] = {}
    for unit in range(len(units)):
        now = units.samples(unit)
        for delta in SARM:
            for row in np.maximum(now + delta, first[now]).tolist():
                owners.setdefault(int(starts[row]), set()).add(unit)
    heads = set((np.cumsum(lengths) - lengths).tolist())
    assert all(len(units_of) == 1 for gop_start, units_of in owners.items() if gop_start not in heads)


@pytest.mark.parametrize("gop", [4, 7, 8, 20])
def test_gops_that_do_not_divide_the_stride(gop):
    lengths = np.full(5, 600)
    units = build_units(lengths, [gops(lengths, gop)], [SARM])
    assert decoded_per_sample(units, lengths, [gops(lengths, gop)], [SARM]) <= 1.1


def test_gops_as_long_as_the_stride_make_whole_episodes():
    lengths = np.array([300, 280])
    for gop in (30, 250):
        units = build_units(lengths, [gops(lengths, gop)], [SARM])
        assert units.count.tolist() == [300, 280]


def test_long_episodes_are_cut_all_the_same():
    lengths = np.full(3, 9000)
    starts = [gops(lengths, 2)]
    units = build_units(lengths, starts, [SARM])
    assert decoded_per_sample(units, lengths, starts, [SARM]) <= 1.1
    assert (
        units.count.max() <= 2 * 20 * 7 * 2
    )  # two frames of every stride, some twenty windows of seven strides
    small = build_units(lengths, starts, [SARM], most=64)
    assert small.count.max() <= 128 < units.count.max()
    long = build_units(lengths, [gops(lengths, 250)], [SARM], most=1000)
    assert long.count.max() <= 2000


def test_episodes_shorter_than_their_window():
    lengths, rows = np.array([1, 5, 0, 29]), np.array([3, 5, 2, 31])
    for deltas in (SARM, [0, 30, 60], [-1, 0]):
        units = build_units(lengths, [gops(rows, 2)], [deltas], rows=rows)
        assert units.size == 35
        assert decoded_per_sample(units, lengths, [gops(rows, 2)], [deltas], rows=rows) < 3


def test_pick_follows_the_formula():
    units = Units(*(np.array(x) for x in ([0, 2], [7, 5], [2, 2], [4, 4])))
    assert units.samples(0).tolist() == [0, 1, 4, 5, 8, 9, 12]
    assert units.sample_at(np.array([1, 1, 0]), np.array([0, 3, 6])).tolist() == [2, 7, 12]
