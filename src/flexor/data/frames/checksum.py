"""Checksums of cached frames: sums of the 64-bit words of each block, times an odd number that belongs to the block.

Any single change and all that disks do (lost, foreign, shifted or cut off blocks) change it. It does not protect from
changes that are made to fit. numpy computes it several times as fast as zlib computes a CRC.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from flexor.core.rng import mix_numpy

WORD = np.dtype("<u8")
BLOCK = 512  # words: a page, the smallest part of a file that gets lost
_IDS, _SIZES = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


def checksums(rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Of the frames `ids` [n], whose bytes are uint8 [n, size]. It depends on the id: no frame passes for another."""
    count, size = rows.shape
    blocks = size // (BLOCK * WORD.itemsize)
    full_bytes = blocks * BLOCK * WORD.itemsize
    rest = np.zeros((count, BLOCK * WORD.itemsize), np.uint8)
    rest[:, : size - full_bytes] = rows[:, full_bytes:]
    sums = np.empty((count, blocks + 1), WORD)
    rows[:, :full_bytes].view(WORD).reshape(count, blocks, BLOCK).sum(axis=2, out=sums[:, :blocks])
    np.einsum("ij,j->i", rest.view(WORD), _keys(BLOCK), out=sums[:, blocks])
    with np.errstate(over="ignore"):  # numbers of 64 bits wrap
        salt = (ids.astype(np.uint64) + np.uint64(1)) * _IDS + np.uint64(size) * _SIZES
        return np.einsum("ij,j->i", sums, _keys(blocks + 1)) + salt


@lru_cache(maxsize=8)
def _keys(count: int) -> np.ndarray:
    keys = mix_numpy(np.arange(1, count + 1, dtype=WORD)) | np.uint64(1)
    keys.flags.writeable = False
    return keys
