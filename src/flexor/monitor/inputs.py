"""States and actions that a policy can't learn from. They are all in memory, so a run checks them before it begins.

It finds dimensions that never change, statistics that belong to other data, episodes recorded in other units than the
rest, and single values far away from all others. Each finding names the joint and the episodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flexor.core.batch import ACTION
from flexor.core.findings import Finding, Fix
from flexor.core.name_ranges import consecutive
from flexor.data.dataset import Dataset
from flexor.data.format.flat_names import flat_names
from flexor.data.mixture.mixed import MixedDataset
from flexor.policies.features import Kind
from flexor.policies.processing.normalize import Normalize, NormalizeByDataset, required_statistics
from flexor.policies.processing.pipeline import Pipeline
from flexor.policies.processing.relative_actions import RelativeActions
from flexor.policies.rename import in_dataset
from flexor.runs.text import figure

SAMPLED = 100_000  # rows that quantiles and deviations are computed of
NAMED = 12  # episodes and dimensions that a text lists
FAR_MEAN, FAR_STD = 3.0, 5.0  # of normalised values of a whole dataset, which are near 0 and 1
NARROW_STD, NARROW_RANGE = 0.05, 0.1  # the same, and their range, if the statistics are much too wide
OUTLIER = 20.0  # distance from the range of 98 % of the values, in such ranges
UNITS = {180 / np.pi: "degrees and radians", 100.0: "percent and fractions", 1000.0: "m and mm"}
UNIT_GAP = 10.0  # factor between episodes of one unit and those of another
IDLE = 1e-4  # of the largest movement: an episode in which a joint moves less says nothing about its unit


@dataclass(frozen=True, eq=False)
class EpisodeValues:
    """A feature of some episodes of one dataset."""

    dataset: Dataset
    name: str
    low: np.ndarray  # [E, D]
    high: np.ndarray  # [E, D]
    sample: np.ndarray  # float64 [n, D], rows spread over all

    @cached_property
    def is_constant(self) -> np.ndarray:
        low, high = self.low.min(0), self.high.max(0)
        return high - low <= 1e-6 * np.maximum(1e-3, np.maximum(np.abs(low), np.abs(high)))

    @cached_property
    def size(self) -> np.ndarray:
        """The largest absolute value of each episode. [E, D]"""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    def dimension(self, number: int) -> str:
        return f"{self.name}[{number}]{self._called(number)}"

    def _called(self, number: int) -> str:
        names = flat_names(self.dataset.features[self.name].names, self.low.shape[1])
        return f" ({names[number]})" if names else ""

    def dimensions(self, numbers: Sequence[int]) -> str:
        """action[6] (gripper), or action[0 (shoulder), 6 (gripper)]."""
        if len(numbers) == 1:
            return self.dimension(numbers[0])
        return f"{self.name}[{_listed([f'{number}{self._called(number)}' for number in numbers])}]"


def value_findings(
    dataset: Dataset, before: Pipeline, rename_map: Mapping[str, str] | None = None
) -> list[Finding]:
    """Faults in the states and actions of a run. `before`: the processing of its batches."""
    findings: list[Finding] = []
    for step in before.steps:
        if not isinstance(step, Normalize):
            continue
        keys = [key for key, feature in step.features.items() if feature.type is not Kind.VISUAL]
        for key, name in zip(keys, in_dataset(keys, rename_map or {})):
            for number, part in _parts(dataset, step):
                if name in part.columns:
                    is_relative = key == ACTION and _has_relative_actions(before)
                    member = None if is_relative else number
                    with np.errstate(all="ignore"):  # values near the limits of float64
                        findings += _findings(summarise(part, name), step, key, member)
    return findings


def _findings(values: EpisodeValues, step: Normalize, key: str, member: int | None) -> list[Finding]:
    """`member`: the dataset whose statistics are used; None if they are not those of the values."""
    units, odd = other_units(values)
    statistics = [] if member is None else wrong_statistics(values, step, key, member)
    return [*constant(values, key == ACTION), *units, *statistics, *outliers(values, odd)]


def _parts(dataset: Dataset, step: Normalize) -> list[tuple[int, Dataset]]:
    """What is normalised together: everything, or each dataset for itself."""
    if isinstance(step, NormalizeByDataset) and isinstance(dataset, MixedDataset):
        members = set(dataset.member_of(dataset.episodes.index).tolist())
        return [(number, dataset.only(number)) for number in sorted(members)]
    return [(0, dataset)]


def _has_relative_actions(before: Pipeline) -> bool:
    return any(isinstance(step, RelativeActions) and step.enabled for step in before.steps)


def summarise(dataset: Dataset, name: str) -> EpisodeValues:
    rows = dataset.columns[name].reshape(len(dataset), -1)
    start = dataset.episodes.start
    low, high = (np.asarray(by.reduceat(rows, start), np.float64) for by in (np.fmin, np.fmax))
    sample = rows[:: -(-len(rows) // SAMPLED)].astype(np.float64)
    # a check finds values that are NaN or infinite, and a loss that is stops the run
    low, high, sample = (np.nan_to_num(part, nan=0.0, posinf=0.0, neginf=0.0) for part in (low, high, sample))
    return EpisodeValues(dataset, name, low, high, sample)


def constant(values: EpisodeValues, is_action: bool) -> list[Finding]:
    which = np.flatnonzero(values.is_constant).tolist()
    if not which:
        return []
    count = len(values.dataset.episodes)
    constant_value = f" (it is {figure(float(values.low[0, which[0]]))})" if len(which) == 1 else ""
    change = "if the robot has such a motor, it was not recorded: record it; if not, remove the dimension"
    if not is_action:
        change = "if it can change on the robot, remove it: normalisation divides any change by almost zero"
    return [
        Finding(
            "dead action dimension" if is_action else "state never changes",
            f"{values.dimensions(which)} {'is' if len(which) == 1 else 'are'} constant in all {count} "
            f"episodes{constant_value}",
            [Fix(change)],
        )
    ]


def wrong_statistics(values: EpisodeValues, step: Normalize, key: str, member: int) -> list[Finding]:
    """Statistics in use that are not those of the values: of another dataset, or older than the data."""
    mode = step.mode(key)
    scale = _scale(step, key, mode, member)
    if scale is None or scale[0].size not in (1, values.low.shape[1]):
        return []
    shift, span = (np.broadcast_to(part, values.low.shape[1:]) for part in scale)
    mean, std = (values.sample.mean(0) - shift) / span, values.sample.std(0) / span
    reached = (values.high.max(0) - values.low.min(0)) / (2 * span)
    narrow = std < NARROW_STD if mode == "MEAN_STD" else reached < NARROW_RANGE
    wrong = (np.abs(mean) > FAR_MEAN) | (std > FAR_STD) | narrow
    wrong &= ~values.is_constant
    if not wrong.any():
        return []
    extent = np.where(wrong, np.maximum(np.abs(mean), std), 0.0)
    too_narrow = wrong & narrow & (extent <= FAR_MEAN)
    worst = int(np.argmax(np.where(too_narrow, 1 / np.maximum(std, 1e-12), extent)))
    reach = np.maximum(np.abs(values.low - shift), np.abs(values.high - shift))[:, worst] / span[worst]
    far = np.flatnonzero(reach > FAR_MEAN) if extent[worst] > FAR_MEAN else np.arange(len(reach))
    expected = "about 0 and 1" if mode == "MEAN_STD" else "values between -1 and 1"
    fix = "the statistics are those of other data: compute them with `flexor data stats DIR --write`"
    return [
        Finding(
            "wrong statistics",
            f"{values.dimensions(np.flatnonzero(wrong).tolist())}: normalised, {values.dimension(worst)} "
            f"has a mean of {figure(float(mean[worst]))} and a standard deviation of {figure(float(std[worst]))} "
            f"instead of {expected}, in {_which(values.dataset, far)}",
            [Fix(fix)],
        )
    ]


def _scale(step: Normalize, key: str, mode: str, member: int) -> tuple[np.ndarray, np.ndarray] | None:
    """What is subtracted from values, and what they are divided by; None if they are used as they are."""
    names = required_statistics(mode)
    if not names or key not in step.stats:
        return None
    if isinstance(step, NormalizeByDataset):
        first, second = (each[member] for each in step.stats_by_dataset[key])
    else:
        first, second = (step.stats[key][name] for name in names)
    low, high = (np.asarray(part.cpu(), np.float64).reshape(-1) for part in (first, second))
    if mode == "MEAN_STD":
        return low, high + step.eps
    return (low + high) / 2, np.where(high == low, step.eps, high - low) / 2


def other_units(values: EpisodeValues) -> tuple[list[Finding], np.ndarray]:
    """Episodes in other units than the rest; and which episodes and dimensions these are, [E, D]."""
    odd = np.zeros(values.low.shape, bool)
    findings: list[Finding] = []
    splits: dict[bytes, list[int]] = {}
    for number in np.flatnonzero(~values.is_constant).tolist():
        larger = _split(values.size[:, number], (values.high - values.low)[:, number])
        if larger is not None:
            splits.setdefault(larger.tobytes(), []).append(number)
    for key, numbers in splits.items():
        kind = np.frombuffer(key, np.int8)  # 1: larger, -1: smaller, 0: says nothing
        unit = _unit(values, numbers, kind)
        if unit is None:
            continue
        few = kind == (1 if (kind == 1).sum() <= (kind == -1).sum() else -1)
        odd[np.ix_(few, numbers)] = True
        findings.append(_unit_finding(values, numbers, few, *unit))
    return findings, odd


def _split(size: np.ndarray, moved: np.ndarray) -> np.ndarray | None:
    """Episodes in two groups far apart, of which one both moves further and has larger values. int8 [E]"""
    says = moved > IDLE * moved.max()
    if says.sum() < 2:
        return None
    logs = np.sort(np.log(size[says]))
    gap = int(np.argmax(np.diff(logs)))
    if logs[gap + 1] - logs[gap] < np.log(UNIT_GAP):
        return None
    larger = says & (np.log(np.maximum(size, 1e-300)) > (logs[gap] + logs[gap + 1]) / 2)
    if moved[larger].min() < 3 * moved[says & ~larger].max():
        return None
    return larger.astype(np.int8) - (says & ~larger).astype(np.int8)


def _unit(values: EpisodeValues, numbers: Sequence[int], kind: np.ndarray) -> tuple[float, str] | None:
    """The factor between two groups of episodes if it is that of two units; in one or two joints more precisely so."""
    ratios = []
    for part in (values.size, values.high - values.low):
        groups = (np.median(part[kind == side][:, numbers], axis=0) for side in (1, -1))
        larger, smaller = groups
        ratios.append(np.log(larger / smaller))
    sizes, moves = ratios
    several = len(numbers) > 2
    nearest = min(UNITS, key=lambda factor: abs(float(np.median(sizes)) - np.log(factor)))
    off = max(abs(float(np.median(each)) - np.log(nearest)) for each in (sizes, moves))
    spread = float(np.median(np.abs(sizes - np.median(sizes))))
    if off > np.log(1.6 if several else 1.25) or spread > np.log(1.6):
        return None
    return float(np.exp(np.median(sizes))), UNITS[nearest]


def _unit_finding(
    values: EpisodeValues, numbers: Sequence[int], few: np.ndarray, factor: float, units: str
) -> Finding:
    dataset, first = values.dataset, numbers[0]
    size_here = float(values.size[few, first].max())
    size_elsewhere = float(np.median(values.size[~few, first]))
    size = "larger" if size_here > size_elsewhere else "smaller"
    which = np.flatnonzero(few)
    several = len(numbers) > 1
    subject = f"{values.dimension(first)}{f' and {len(numbers) - 1} more' if several else ''}"
    all_of_them = f". All of them: {values.dimensions(numbers)}" if several else ""
    convert = "convert these episodes, then compute statistics with `flexor data stats DIR --write`; or leave them out"
    return Finding(
        "mixed units",
        f"{subject} {'are' if several else 'is'} about {factor:.0f} times {size} in "
        f"{_which(dataset, which)} than in the others (up to {figure(size_here)}, usually "
        f"{figure(size_elsewhere)}). It looks like {units}{all_of_them}",
        [Fix(f"{convert}: {exclude(dataset, dataset.episodes.index[which].tolist())}")],
    )


def outliers(values: EpisodeValues, explained: np.ndarray) -> list[Finding]:
    """Values far away from all others, such as those of a failed sensor. `explained`: by other findings, [E, D]."""
    low, high = np.quantile(values.sample, [0.01, 0.99], axis=0)
    span = high - low
    above, below = (part / np.maximum(span, 1e-300) for part in (values.high - high, low - values.low))
    far = np.where((span > 0) & ~explained, np.maximum(above, below), 0.0)
    if far.max(initial=0.0) <= OUTLIER:
        return []
    episode, number = np.unravel_index(int(np.argmax(far)), far.shape)
    value = (values.high if above[episode, number] > below[episode, number] else values.low)[episode, number]
    dataset = values.dataset
    start, end = dataset.episodes.start[episode], dataset.episodes.end[episode]
    column = dataset.columns[values.name].reshape(len(dataset), -1)[start:end, number]
    frame = int(np.argmin(np.abs(column.astype(np.float64) - value)))
    some = np.flatnonzero((far > OUTLIER).any(1))
    repair = (
        "look at it with `flexor data show DIR`; repair it and compute statistics with "
        "`flexor data stats DIR --write`, or leave it out"
    )
    also = f"; also in {_which(dataset, some[some != episode])}" if len(some) > 1 else ""
    return [
        Finding(
            "values out of range",
            f"{values.dimension(int(number))} is {figure(float(value))} in "
            f"{_which(dataset, np.array([episode]))}, frame {frame}; 98 % of its values are between "
            f"{figure(float(low[number]))} and {figure(float(high[number]))}{also}",
            [Fix(f"{repair}: {exclude(dataset, dataset.episodes.index[some].tolist())}")],
        )
    ]


# Episodes in words.


def _which(dataset: Dataset, positions: np.ndarray) -> str:
    if len(positions) == len(dataset.episodes) and not _several(dataset):
        return f"all {len(positions)} episodes" if len(positions) > 1 else "its only episode"
    return in_words(dataset, dataset.episodes.index[positions].tolist())


def in_words(dataset: Dataset, episodes: Sequence[int]) -> str:
    """Episodes by the numbers that a user knows: episodes 3, 7 of lab/a."""
    return " and ".join(
        f"{'episode' if len(numbers) == 1 else 'episodes'} {_listed(_ranges(numbers, ' to ', 0))}"
        + (f" of {name}" if name else "")
        for name, numbers in _by_member(dataset, episodes)
    )


def exclude(dataset: Dataset, episodes: Sequence[int]) -> str:
    """What leaves out episodes."""
    return " and ".join(
        f"exclude_episodes: {','.join(_ranges(numbers, ':', 1))} of {name} in dataset.mix"
        if name
        else f"--dataset.exclude_episodes={','.join(_ranges(numbers, ':', 1))}"
        for name, numbers in _by_member(dataset, episodes)
    )


def _several(dataset: Dataset) -> bool:
    return isinstance(dataset, MixedDataset) and len(dataset.members) > 1


def _by_member(dataset: Dataset, episodes: Sequence[int]) -> list[tuple[str, list[int]]]:
    if not isinstance(dataset, MixedDataset) or not _several(dataset):
        return [("", sorted(episodes))]
    members: dict[str, list[int]] = {}
    for episode in sorted(episodes):
        number = int(dataset.member_of(np.array([episode]))[0])
        local = episode - int(dataset.first_episode[number])
        members.setdefault(dataset.names[number], []).append(local)
    return list(members.items())


def _ranges(numbers: Iterable[int], sign: str, past: int) -> list[str]:
    """Neighbours as a range: 3, 5 to 8. `past`: 1 if a range ends after its last number."""
    ranges: list[str] = []
    for run in consecutive(numbers):
        ranges += map(str, run) if len(run) < 3 else [f"{run[0]}{sign}{run[-1] + past}"]
    return ranges


def _listed(texts: Sequence[str]) -> str:
    rest = len(texts) - NAMED
    return ", ".join(texts[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
