"""Sets of frames in flat arrays: for many small sets, objects would cost more than decoding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["FrameSets"]


@dataclass(frozen=True, eq=False)
class FrameSets:
    """Frames of one camera in several sets. Those of set k are at edges[k] to edges[k + 1], distinct and ascending."""

    ids: np.ndarray  # [n]
    uses: np.ndarray  # [n] how often each is read
    edges: np.ndarray  # [N + 1]

    @classmethod
    def of(cls, frames: np.ndarray, sets: np.ndarray, count: int) -> FrameSets:
        """frames[i] belongs to set sets[i], of `count` sets; both [n]."""
        low = int(frames.min(initial=0))
        span = int(frames.max(initial=0)) - low + 1
        keys = sets * span + (frames - low)
        keys.sort()
        uses = np.ones(len(keys), np.int64)
        if not (keys[1:] > keys[:-1]).all():
            keys, uses = np.unique(keys, return_counts=True)
        numbers, offsets = np.divmod(keys, span)
        return cls(low + offsets, uses, np.searchsorted(numbers, np.arange(count + 1)))

    def __len__(self) -> int:
        return len(self.edges) - 1

    def __getitem__(self, sets: slice) -> FrameSets:
        """Sets that follow each other."""
        first, stop, _ = sets.indices(len(self))
        edges = self.edges[first : stop + 1]
        frames = slice(edges[0], edges[-1])
        return FrameSets(self.ids[frames], self.uses[frames], edges - edges[0])

    @property
    def counts(self) -> np.ndarray:
        """Frames of each set, [N]."""
        return np.diff(self.edges)

    @property
    def numbers(self) -> np.ndarray:
        """The set of each frame, [n]."""
        return np.repeat(np.arange(len(self)), self.counts)

    def take(self, sets: np.ndarray) -> FrameSets:
        """Any sets, in this order."""
        counts = self.counts[sets]
        edges = np.append(0, np.cumsum(counts))
        places = np.arange(edges[-1]) + np.repeat(self.edges[sets] - edges[:-1], counts)
        return FrameSets(self.ids[places], self.uses[places], edges)

    def only(self, mask: np.ndarray) -> FrameSets:
        """Some frames of each set: bool [n]."""
        return FrameSets(self.ids[mask], self.uses[mask], np.append(0, np.cumsum(mask))[self.edges])
