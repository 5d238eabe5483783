"""The order of samples: every one once per epoch, from any position, at no cost in memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexor.data.order import Permutation, UniformOrder


@given(st.integers(1, 5000), st.integers() | st.text())
@settings(max_examples=150, deadline=None)
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
    one, two = (Permutation(10_000, "order", 1, epoch)(np.arange(10_000)) for epoch in (0, 1))
    assert (one == two).sum() < 20 and (one == np.arange(10_000)).sum() < 20
    assert abs(np.corrcoef(one, np.arange(10_000))[0, 1]) < 0.04
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.04


@given(st.integers(1, 300), st.integers(1, 50), st.integers(0, 2**40), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_every_sample_once_per_epoch_whatever_the_batch(size, batch, seed, epochs):
    order = UniformOrder(size, seed)
    batches = [order.samples(start, batch) for start in range(0, size * epochs, batch)]
    seen = np.concatenate(batches)[: size * epochs]
    assert all(len(b) == batch for b in batches)  # full across the end of an epoch
    for epoch in seen.reshape(epochs, size):
        assert np.array_equal(np.sort(epoch), np.arange(size))


@given(st.integers(1, 300), st.integers(0, 2000), st.integers(1, 400), st.integers(0, 400))
@settings(max_examples=80, deadline=None)
def test_positions_mean_the_same_wherever_one_starts(size, start, count, skip):
    order = UniformOrder(size, 3)
    whole = order.samples(start, count + skip)
    assert np.array_equal(UniformOrder(size, 3).samples(start + skip, count), whole[skip:])


def test_seeds_and_epochs_differ():
    order = UniformOrder(1000, 1)
    first, second = order.samples(0, 1000), order.samples(1000, 1000)
    assert (first == second).sum() < 10
    assert (first == UniformOrder(1000, 2).samples(0, 1000)).sum() < 10
    assert order.epoch(1500) == 1.5


def test_a_trillion_samples_cost_nothing():
    tracemalloc.start()
    order = UniformOrder(10**12, 0)
    found = order.samples(7 * 10**12 - 50, 100)  # across the end of the seventh epoch
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    assert len(set(found.tolist())) >= 99 and found.min() >= 0 and found.max() < 10**12
