"""The caching allocator: sequences worked out by hand from torch's rules, and what must hold for any sequence."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexor.plan.memory.allocator import MIB, CachingAllocator, MemoryBlock, OutOfMemory

SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(MIB, 64 * MIB))
ACTIONS = st.lists(st.tuples(SIZES, st.integers(0, 10), st.integers(0, 1)), max_size=60)


def test_small_requests_are_rounded_to_512_bytes_and_share_a_segment_of_2_mib():
    memory = CachingAllocator()
    blocks = [memory.malloc(n) for n in (1, 512, 513)]
    assert [b.size for b in blocks if b] == [512, 512, 1024]
    assert (memory.allocated, memory.reserved) == (2048, 2 * MIB)


def test_requests_over_1_mib_share_a_segment_of_20_mib():
    memory = CachingAllocator()
    memory.malloc(MIB + 1)
    memory.malloc(9 * MIB)
    assert memory.reserved == 20 * MIB
    memory.malloc(9 * MIB)  # 20 - 1 - 9 leaves just under 10
    assert memory.reserved == 20 * MIB
    memory.malloc(2 * MIB)
    assert memory.reserved == 40 * MIB


def test_requests_from_10_mib_on_have_their_own_segment_in_steps_of_2_mib():
    memory = CachingAllocator()
    block = memory.malloc(10 * MIB + 1)
    # the rest, just under 2 MiB, is more than 1 MiB and is split off
    assert block is not None and block.size == 10 * MIB + 512
    assert memory.reserved == 12 * MIB


def test_a_remainder_of_1_mib_or_less_is_not_split_off_a_large_block():
    memory = CachingAllocator()
    block = memory.malloc(11 * MIB)
    assert block is not None and block.size == 12 * MIB
    assert memory.allocated == 12 * MIB


def test_best_fit_takes_the_smallest_block_that_is_large_enough():
    memory = CachingAllocator()
    large, small = memory.malloc(40 * MIB), memory.malloc(30 * MIB)
    memory.free(large)
    memory.free(small)
    again = memory.malloc(29 * MIB + 512)
    assert again is small and memory.reserved == 70 * MIB


def test_frees_merge_with_both_neighbours():
    memory = CachingAllocator()
    a, b, c = (memory.malloc(6 * MIB) for _ in range(3))
    memory.free(a)
    memory.free(c)
    memory.free(b)
    assert memory.malloc(18 * MIB) is a
    assert memory.reserved == 20 * MIB


def test_nothing_is_given_back_until_the_capacity_is_reached():
    memory = CachingAllocator(capacity=100 * MIB)
    memory.free(memory.malloc(60 * MIB))
    assert memory.reserved == 60 * MIB
    memory.malloc(80 * MIB)
    assert memory.reserved == 80 * MIB and memory.retries == 1
    with pytest.raises(OutOfMemory):
        memory.malloc(30 * MIB)


def test_an_expandable_segment_grows_by_pages_and_uses_its_free_end():
    memory = CachingAllocator(expandable=True)
    a = memory.malloc(30 * MIB)
    assert memory.reserved == 40 * MIB
    memory.malloc(15 * MIB)  # 10 are there, a page of 20 is added
    assert memory.reserved == 60 * MIB
    memory.free(a)
    memory.malloc(20 * MIB)  # into the hole, not to the end
    assert memory.reserved == 60 * MIB


def test_an_expandable_segment_gives_back_whole_free_pages():
    memory = CachingAllocator(capacity=100 * MIB, expandable=True)
    a, _ = memory.malloc(50 * MIB), memory.malloc(30 * MIB)
    memory.free(a)
    assert memory.reserved == 80 * MIB
    memory.malloc(60 * MIB)  # two pages and a half are free at the front: two go back
    assert memory.reserved == 100 * MIB and memory.retries == 1
    with pytest.raises(OutOfMemory):
        memory.malloc(20 * MIB)


def test_streams_do_not_share_memory():
    memory = CachingAllocator()
    memory.free(memory.malloc(4 * MIB, stream=1))
    memory.malloc(4 * MIB)
    assert memory.reserved == 40 * MIB


def test_nothing_is_allocated_for_no_bytes():
    memory = CachingAllocator()
    memory.free(memory.malloc(0))
    assert memory.reserved == memory.allocated == 0


@pytest.mark.parametrize("expandable", [False, True])
@given(actions=ACTIONS)
def test_any_sequence(expandable: bool, actions: list[tuple[int, int, int]]):
    memory = CachingAllocator(expandable=expandable)
    live: list[tuple[MemoryBlock, int]] = []
    for size, pick, stream in actions:
        if pick > 5 and live:
            block, _ = live.pop(pick % len(live))
            memory.free(block)
        else:
            block = memory.malloc(size, stream)
            assert block is not None
            live.append((block, size))
        check(memory, live)
    for block, _ in live:
        memory.free(block)
    assert memory.allocated == 0
    free = [block for blocks in memory._free.values() for _, _, block in blocks]
    assert sum(block.size for block in free) == memory.reserved  # nothing lost
    assert all(block.before is None and block.after is None for block in free)  # all merged


def check(memory: CachingAllocator, live: list[tuple[MemoryBlock, int]]) -> None:
    free = [block for blocks in memory._free.values() for _, _, block in blocks]
    ranges = sorted((b.address, b.address + b.size) for b in [*(b for b, _ in live), *free])
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    assert all(block.size >= size and not block.free for block, size in live)
    assert memory.allocated == sum(block.size for block, _ in live)
    assert memory.allocated <= memory.reserved <= memory.peak_reserved
    for block in free:
        assert not any(other is not None and other.free for other in (block.before, block.after))
