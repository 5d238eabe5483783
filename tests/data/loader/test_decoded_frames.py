"""The table of decoded frames gives what dictionaries would, in any sequence of pieces and reads."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flexor.data.loader.decoded_frames import SlotTable

FRAMES = 50
PIECES = st.lists(st.dictionaries(st.integers(0, FRAMES - 1), st.integers(1, 3), max_size=8), max_size=40)


@given(PIECES, st.data())
def test_like_a_dictionary_of_each_piece(pieces, data):
    table, slots, uses = SlotTable(FRAMES), {}, {}
    for number, counts in enumerate(pieces):
        ids = np.array(sorted(counts), np.int64)
        new = np.arange(len(ids)) + 1000 * number
        table.add(number, ids, new, np.array([counts[i] for i in ids.tolist()], np.int64))
        slots |= {(number, i): slot for i, slot in zip(ids.tolist(), new.tolist())}
        uses |= {(number, i): count for i, count in counts.items()}
        in_use = sorted(key for key in uses if uses[key])
        if in_use and data.draw(st.booleans()):
            keys = data.draw(st.lists(st.sampled_from(in_use), max_size=6, unique=True))
            free = [slots.pop(key) for key in keys if uses[key] == 1]
            uses |= {key: uses[key] - 1 for key in keys}
            read = table.read(*np.array(keys, np.int64).reshape(-1, 2).T)
            assert sorted(read.tolist()) == sorted(free)
        if data.draw(st.integers(0, 3)) == 0:
            gone = data.draw(st.integers(0, number))
            removed = sorted(slots.pop(key) for key in [*slots] if key[0] == gone)
            assert sorted(table.remove(np.array([gone])).tolist()) == removed
            uses = {key: count for key, count in uses.items() if key[0] != gone}
    every = [(number, i) for number in range(-1, len(pieces)) for i in range(FRAMES)]
    assert table.find(*np.array(every).T).tolist() == [slots.get(key, -1) for key in every]


def test_a_table_that_is_full_grows_and_forgets_what_was_read():
    table = SlotTable(10_000)
    for number in range(300):
        ids = np.arange(100)
        table.add(number, ids, ids + number, np.ones(100, np.int64))
        if number >= 20:
            old = np.full(100, number - 20)
            assert (table.find(old, ids) == ids + number - 20).all()
            assert (table.read(old, ids) == ids + number - 20).all()
    assert len(table._keys) < 8000
