import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexor.data.frames.slots import Buffers, Pool


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), max_size=30))
def test_slots_in_use_never_overlap_and_stay_within_the_budget(requests):
    pool, allocated = Pool(40), []
    for size, count in requests:
        slots = pool.take({size: count})
        if slots is None:
            assert pool.used + size * count > 40
            if allocated:
                pool.give(*allocated.pop(0))
            continue
        allocated.append((size, slots[size]))
        assert pool.used == sum(size * len(numbers) for size, numbers in allocated) <= 40
    everything = [pool.slot(size, number) for size, numbers in allocated for number in numbers]
    for value, slot in enumerate(everything):
        slot[:] = value
    assert all((slot == value).all() for value, slot in enumerate(everything))


def test_all_or_nothing():
    pool = Pool(10)
    assert pool.take({4: 2, 3: 1}) is None and pool.used == 0
    assert pool.take({4: 2}) is not None and pool.used == 8
    assert pool.take({4: 2}, force=True) is not None and pool.peak == 16


def test_slots_are_used_again():
    pool = Pool(1000)
    first = pool.take({100: 3})[100]
    pool.give(100, first)
    assert {*pool.take({100: 3})[100].tolist()} == {*first.tolist()}


@pytest.mark.parametrize("budget", [0, 2000])
def test_slots_are_gathered_from_all_blocks(budget):
    pool = Pool(budget)
    numbers = np.concatenate([pool.take({700: count}, force=True)[700] for count in (1, 2000, 3)])
    for value, number in enumerate(numbers[::100]):
        pool.slot(700, number)[:] = value
    out = np.empty((len(numbers[::100]), 700), np.uint8)
    pool.gather(700, numbers[::100], out)
    assert (out == np.arange(len(out))[:, None]).all()


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
