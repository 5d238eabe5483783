"""States and actions that a policy can't learn from. `flexor data check` and the start of a run look for the same.

They find dimensions that never change, statistics that belong to other data, episodes recorded in other units than the
rest, and single values far away from all others. Each fault names the joint and the episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from flexor.core.findings import Finding, Fix
from flexor.data.check.episode_names import EpisodeNames, listed
from flexor.data.dataset import Dataset
from flexor.data.format.flat_names import flat_names
from flexor.data.mixture.mixed import without_padding
from flexor.runs.text import figure

SAMPLED = 100_000  # rows that quantiles and deviations are computed of
OUTLIER = 20.0  # distance from the range of 98 % of the values, in such ranges
JUMP = 0.8  # of this distance: a joint gets there in smaller steps, a failed sensor does not


@dataclass(frozen=True)
class ValueFault:
    """What is wrong with the values of a feature."""

    name: str
    evidence: str
    fix: str
    frames: dict[int, int] = field(default_factory=dict)
    """The episodes that it concerns, and the frame of each at which it begins; empty if all of them."""

    @property
    def finding(self) -> Finding:
        return Finding(self.name, self.evidence, [Fix(self.fix)])


@dataclass(frozen=True, eq=False)
class EpisodeValues:
    """A feature of some episodes of a dataset."""

    name: str
    labels: list[str]  # of its dimensions; empty if they have none
    names: EpisodeNames
    rows: np.ndarray  # [N, D] nan where there is no value
    start: np.ndarray  # [E] first row of each episode
    low: np.ndarray  # [E, D] nan where an episode has no value
    high: np.ndarray  # [E, D]
    sample: np.ndarray  # float64 [n, D], rows spread over all

    @cached_property
    def is_constant(self) -> np.ndarray:
        low, high = self.lowest, self.highest
        return high - low <= 1e-6 * np.maximum(1e-3, np.maximum(np.abs(low), np.abs(high)))

    @cached_property
    def lowest(self) -> np.ndarray:
        return np.fmin.reduce(self.low)

    @cached_property
    def highest(self) -> np.ndarray:
        return np.fmax.reduce(self.high)

    @cached_property
    def size(self) -> np.ndarray:
        """The largest absolute value of each episode. [E, D]"""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    @cached_property
    def length(self) -> np.ndarray:
        """Rows of each episode. [E]"""
        return np.diff(np.append(self.start, len(self.rows)))

    @property
    def episodes(self) -> list[int]:
        return self.names.index.tolist()

    def of_episode(self, position: int, dimension: int) -> np.ndarray:
        first = int(self.start[position])
        return self.rows[first : first + int(self.length[position]), dimension].astype(np.float64)

    def dimension(self, number: int) -> str:
        return f"{self.name}[{number}]{self._label(number)}"

    def _label(self, number: int) -> str:
        return f" ({self.labels[number]})" if self.labels else ""

    def dimensions(self, numbers: Sequence[int]) -> str:
        """action[6] (gripper), or action[0 (shoulder), 6 (gripper)]."""
        if len(numbers) == 1:
            return self.dimension(numbers[0])
        return f"{self.name}[{listed([f'{number}{self._label(number)}' for number in numbers])}]"


def summarise(dataset: Dataset, name: str) -> EpisodeValues:
    rows = without_padding(dataset, name).reshape(len(dataset), -1)
    labels = flat_names(dataset.features[name].names, rows.shape[1]) or []
    return summarise_rows(name, labels, EpisodeNames.of(dataset), rows, dataset.episodes.start)


def summarise_rows(
    name: str, labels: list[str], names: EpisodeNames, rows: np.ndarray, start: np.ndarray
) -> EpisodeValues:
    """`rows` [N, D] of episodes that begin at `start` [E]."""
    if rows.dtype.kind == "f" and not np.isfinite(rows).all():
        rows = np.where(np.isfinite(rows), rows, np.nan)  # other checks find them
    low, high = (np.asarray(by.reduceat(rows, start), np.float64) for by in (np.fmin, np.fmax))
    sample = rows[:: -(-len(rows) // SAMPLED)].astype(np.float64)
    return EpisodeValues(name, labels, names, rows, start, low, high, sample)


def constant(values: EpisodeValues, is_action: bool) -> list[ValueFault]:
    which = np.flatnonzero(values.is_constant).tolist()
    if not which:
        return []
    constant_value = f" (it is {figure(float(values.low[0, which[0]]))})" if len(which) == 1 else ""
    change = "if the robot has such a motor, it was not recorded: record it; if not, remove the dimension"
    if not is_action:
        change = "if it can change on the robot, remove it: normalisation divides any change by almost zero"
    evidence = (
        f"{values.dimensions(which)} {'is' if len(which) == 1 else 'are'} constant in "
        f"{values.names.at(np.arange(len(values.start)))}{constant_value}"
    )
    return [ValueFault("dead action dimension" if is_action else "state never changes", evidence, change)]


def _moves_there(column: np.ndarray, low: float, high: float) -> bool:
    """Whether an episode's values leave the usual range in steps, and not at once or all of them."""
    beyond = np.fmax(column - high, low - column)
    steps = np.abs(np.diff(column))
    return bool((beyond <= 0).any() and np.nanmax(steps, initial=0.0) < JUMP * np.nanmax(beyond))


def outliers(values: EpisodeValues, explained: np.ndarray) -> list[ValueFault]:
    """Values far away from all others, such as those of a failed sensor. `explained`: by other faults, [E, D]."""
    low, high = np.nanquantile(values.sample, [0.01, 0.99], axis=0)
    span = high - low
    above, below = (part / np.maximum(span, 1e-300) for part in (values.high - high, low - values.low))
    far = np.nan_to_num(np.where((span > 0) & ~explained, np.maximum(above, below), 0.0))
    for episode, number in np.argwhere(far > OUTLIER).tolist():
        if _moves_there(values.of_episode(episode, number), low[number], high[number]):
            far[episode, number] = 0.0
    if far.max(initial=0.0) <= OUTLIER:
        return []
    frames = {}
    some = np.flatnonzero((far > OUTLIER).any(1))
    for position in some.tolist():
        number = int(np.argmax(far[position]))
        ends = values.high if above[position, number] > below[position, number] else values.low
        column = values.of_episode(position, number)
        frames[values.episodes[position]] = int(np.nanargmin(np.abs(column - ends[position, number])))
    episode, number = (int(place) for place in np.unravel_index(int(np.argmax(far)), far.shape))
    value = (values.high if above[episode, number] > below[episode, number] else values.low)[episode, number]
    repair = (
        "look at it with `flexor data show DIR`; repair it and compute statistics with "
        "`flexor data stats DIR --write`, or leave it out"
    )
    also = f"; also in {values.names.at(some[some != episode])}" if len(some) > 1 else ""
    evidence = (
        f"{values.dimension(number)} is {figure(float(value))} in "
        f"{values.names.at(np.array([episode]))}, frame {frames[values.episodes[episode]]}; 98 % of its values are "
        f"between {figure(float(low[number]))} and {figure(float(high[number]))}{also}"
    )
    return [
        ValueFault("values out of range", evidence, f"{repair}: {values.names.exclude([*frames])}", frames)
    ]
