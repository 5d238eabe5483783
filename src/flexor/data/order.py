"""The global sample order: which samples make up batch n, as a pure function.

Nothing is stored but a position. A permutation of any number of samples is computed where it is
needed (a Feistel network walked until it lands inside the range), so an order over a billion frames
costs no memory, and any rank, worker or resumed run computes the same one.
"""

from __future__ import annotations

import numpy as np

from flexor.rng import key_of, mix_numpy

ROUNDS = 6


class Permutation:
    """A pseudo-random bijection of range(size), evaluated at any positions."""

    def __init__(self, size: int, *key: object):
        assert size > 0
        self.size = size
        # Both halves of the Feistel network have `bits` bits; together they cover at least `size`.
        self.bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self.keys = [np.uint64(key_of(*key, round_)) for round_ in range(ROUNDS)]

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """positions [n] in range(size) -> [n], each value of range(size) at exactly one position."""
        values = self._shuffle(np.asarray(positions, np.uint64))
        while (outside := values >= self.size).any():  # the domain is at most four times the range
            values[outside] = self._shuffle(values[outside])
        return values.astype(np.int64)

    def _shuffle(self, x: np.ndarray) -> np.ndarray:
        mask, bits = np.uint64((1 << self.bits) - 1), np.uint64(self.bits)
        left, right = x >> bits, x & mask
        for key in self.keys:
            left, right = right, left ^ (mix_numpy(right + key) & mask)
        return (left << bits) | right


class UniformOrder:
    """Every sample once per epoch, in a full permutation that differs from epoch to epoch.

    Positions count samples since the start of the run; a batch may span the end of an epoch, so every
    batch is full and the whole state is one integer.
    """

    def __init__(self, size: int, seed: int):
        self.size = size
        self.seed = seed

    def samples(self, position: int, count: int) -> np.ndarray:
        """The samples [count] at positions position ... position + count - 1."""
        positions = np.arange(position, position + count)
        epochs, offsets = np.divmod(positions, self.size)
        out = np.empty(count, np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            out[chosen] = Permutation(self.size, "order", self.seed, int(epoch))(offsets[chosen])
        return out

    def epoch(self, position: int) -> float:
        """How many times the data has been seen at this position."""
        return position / self.size
