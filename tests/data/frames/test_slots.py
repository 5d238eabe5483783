import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexor.data.frames.slots import Buffers, Pool


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), max_size=30))
def test_slots_in_use_never_overlap_and_stay_within_the_budget(requests):
    pool, allocated = Pool(40), []
    for size, count in requests:
        taken = pool.take({size: count})
        if taken is None:
            assert pool.used + size * count > 40
            if allocated:
                pool.give(allocated.pop(0))
            continue
        allocated.append(taken[size])
        assert pool.used == sum(len(slot) for slots in allocated for slot in slots) <= 40
    everything = [slot for slots in allocated for slot in slots]
    for number, slot in enumerate(everything):
        slot[:] = number
    assert all((slot == number).all() for number, slot in enumerate(everything))


def test_all_or_nothing():
    pool = Pool(10)
    assert pool.take({4: 2, 3: 1}) is None and pool.used == 0
    assert pool.take({4: 2}) is not None and pool.used == 8
    assert pool.take({4: 2}, force=True) is not None and pool.peak == 16


def test_memory_is_used_again():
    pool = Pool(1000)
    first = pool.take({100: 3})[100]
    addresses = {slot.ctypes.data for slot in first}
    pool.give(first)
    assert {slot.ctypes.data for slot in pool.take({100: 3})[100]} <= addresses | {
        slot.ctypes.data for slot in pool._free[100]
    }


def test_a_buffer_comes_back_when_all_who_hold_it_let_go():
    buffers = Buffers()
    first = buffers.take((4, 5))
    address = first.ctypes.data
    view = torch.from_numpy(np.moveaxis(first, 0, 1))[1:]
    del first
    assert buffers.take((4, 5)).ctypes.data != address  # the tensor still looks at it
    other = buffers.take((4, 6))
    del view
    assert buffers.take((4, 5)).ctypes.data == address
    assert other.shape == (4, 6)
