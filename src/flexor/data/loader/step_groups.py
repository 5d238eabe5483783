"""Groups of successive steps that are loaded together. The first ones are small: the first batch comes soon."""

from __future__ import annotations

import numpy as np

__all__ = ["StepGroups"]


class StepGroups:
    """The groups of a range of steps, numbered from 0: of 1, 1, 2, 4, 8 steps and so on, up to `most`."""

    def __init__(self, steps: range, most: int):
        assert steps.step == 1 and most > 0
        self.steps, self.most = steps, most
        powers = [2**power for power in range((most - 1).bit_length())]
        self._begins = np.array(
            [0, *powers]
        )  # of the groups until they are large, relative to the first step
        self._large = int(self._begins[-1])  # where groups of `most` steps begin

    @property
    def count(self) -> int:
        return int(self.number_of(np.array([self.steps.stop - 1]))[0]) + 1 if self.steps else 0

    def of(self, number: int) -> range:
        """The steps of a group."""
        return range(self._begin(number), min(self.steps.stop, self._begin(number + 1)))

    def number_of(self, steps: np.ndarray) -> np.ndarray:
        """The group of each step, also of those before the first and after the last."""
        steps = steps - self.steps.start
        large = len(self._begins) - 1 + (steps - self._large) // self.most
        small = np.searchsorted(self._begins, steps, side="right") - 1
        return np.where(steps < self._large, small, large)

    def _begin(self, number: int) -> int:
        last = len(self._begins) - 1
        offset = self._begins[number] if number < last else self._large + (number - last) * self.most
        return self.steps.start + int(offset)
