"""Keys and values of tokens that a decoder has read, to which later tokens attend."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class KVCache(NamedTuple):
    """The keys and values of one layer, each [B, S, kv_heads, head_dim]; keys are rotated. Never written to."""

    keys: Tensor
    values: Tensor

    def append(self, later: KVCache) -> KVCache:
        return KVCache(torch.cat((self.keys, later.keys), 1), torch.cat((self.values, later.values), 1))


class StaticKVCache(NamedTuple):
    """A cache of fixed length, into which later tokens are written at a `cursor` [1] that is a tensor too.

    Its shape never changes, so a CUDA graph can write to it. What has not been written yet must be masked.
    """

    keys: Tensor
    values: Tensor
    cursor: Tensor

    @classmethod
    def allocate(cls, prefix: KVCache, tokens: int, cursor: Tensor) -> StaticKVCache:
        """The prefix, and zeros for so many tokens after it."""
        keys, values = (F.pad(x, (0, 0, 0, 0, 0, tokens)) for x in prefix)
        return cls(keys, values, cursor)

    def append(self, later: KVCache) -> KVCache:
        self.keys.index_copy_(1, self.cursor, later.keys)
        self.values.index_copy_(1, self.cursor, later.values)
        return KVCache(self.keys, self.values)
