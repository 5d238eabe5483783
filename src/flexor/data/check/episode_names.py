"""Episodes in words, by the numbers that a user knows: those of the dataset that they are from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flexor.core.name_ranges import consecutive
from flexor.data.dataset import Dataset
from flexor.data.mixture.mixed import MixedDataset

NAMED = 12  # episodes and dimensions that a text lists


@dataclass(frozen=True, eq=False)
class EpisodeNames:
    """The names of some episodes of a dataset, or of a mixture of several."""

    index: np.ndarray  # [E]
    mixture: MixedDataset | None = None

    @classmethod
    def of(cls, dataset: Dataset) -> EpisodeNames:
        mixed = isinstance(dataset, MixedDataset) and len(dataset.members) > 1
        return cls(dataset.episodes.index, dataset if mixed else None)  # type: ignore[arg-type]

    def at(self, positions: np.ndarray) -> str:
        """The episodes at some positions of `index`."""
        if len(positions) == len(self.index) and self.mixture is None:
            return f"all {len(positions)} episodes" if len(positions) > 1 else "its only episode"
        return self.in_words(self.index[positions].tolist())

    def in_words(self, episodes: Sequence[int]) -> str:
        """Episodes 3, 7 of lab/a."""
        return " and ".join(
            f"{'episode' if len(numbers) == 1 else 'episodes'} {listed(_ranges(numbers, ' to ', 0))}"
            + (f" of {name}" if name else "")
            for name, numbers in self._by_member(episodes)
        )

    def exclude(self, episodes: Sequence[int]) -> str:
        """What leaves out episodes."""
        return " and ".join(
            f"exclude_episodes: {','.join(_ranges(numbers, ':', 1))} of {name} in dataset.mix"
            if name
            else f"--dataset.exclude_episodes={','.join(_ranges(numbers, ':', 1))}"
            for name, numbers in self._by_member(episodes)
        )

    def _by_member(self, episodes: Sequence[int]) -> list[tuple[str, list[int]]]:
        mixture = self.mixture
        if mixture is None:
            return [("", sorted(episodes))]
        members: dict[str, list[int]] = {}
        for episode in sorted(episodes):
            number = int(mixture.member_of(np.array([episode]))[0])
            local_episode = episode - int(mixture.first_episode[number])
            members.setdefault(mixture.names[number], []).append(local_episode)
        return list(members.items())


def listed(texts: Sequence[str]) -> str:
    rest = len(texts) - NAMED
    return ", ".join(texts[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _ranges(numbers: Iterable[int], sign: str, past: int) -> list[str]:
    """Neighbours as a range: 3, 5 to 8. `past`: 1 if a range ends after its last number."""
    ranges: list[str] = []
    for run in consecutive(numbers):
        ranges += map(str, run) if len(run) < 3 else [f"{run[0]}{sign}{run[-1] + past}"]
    return ranges
