"""Sets of frames in flat arrays are what a list of counters would be."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flexor.data.loader.frame_sets import FrameSets

SETS = st.lists(st.lists(st.integers(100, 110), max_size=6), min_size=1, max_size=8)


def counters(sets: FrameSets) -> list[dict[int, int]]:
    parts = [slice(*edges) for edges in zip(sets.edges[:-1].tolist(), sets.edges[1:].tolist())]
    assert all((np.diff(sets.ids[part]) > 0).all() for part in parts)
    return [dict(zip(sets.ids[part].tolist(), sets.uses[part].tolist())) for part in parts]


@given(SETS, st.data())
def test_like_counters(lists, data):
    frames = np.array([frame for frames in lists for frame in frames], np.int64)
    numbers = np.array([number for number, frames in enumerate(lists) for _ in frames], np.int64)
    mixed = np.random.default_rng(0).permutation(len(frames))
    sets = FrameSets.of(frames[mixed], numbers[mixed], len(lists))
    expected = [dict(Counter(frames)) for frames in lists]
    assert counters(sets) == expected and len(sets) == len(lists)
    assert sets.counts.tolist() == [len(part) for part in expected]
    assert sets.numbers.tolist() == [number for number, part in enumerate(expected) for _ in part]
    first, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(lists))] * 2)))
    assert counters(sets[first:stop]) == expected[first:stop]
    places = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=9))
    assert counters(sets.take(np.array(places, np.int64))) == [expected[place] for place in places]
    even = sets.only(sets.ids % 2 == 0)
    assert counters(even) == [{i: n for i, n in part.items() if i % 2 == 0} for part in expected]
