"""States and actions of a run, which are all in memory: what `data/check` finds wrong with them, before it begins."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flexor.core.batch import ACTION
from flexor.core.findings import Finding
from flexor.data.check.units import other_units
from flexor.data.check.values import EpisodeValues, ValueFault, constant, outliers, summarise
from flexor.data.check.wrong_statistics import Scale, wrong_statistics
from flexor.data.dataset import Dataset
from flexor.data.mixture.mixed import MixedDataset
from flexor.policies.features import Kind
from flexor.policies.processing.normalize import Normalize, NormalizeByDataset, required_statistics
from flexor.policies.processing.pipeline import Pipeline
from flexor.policies.processing.relative_actions import RelativeActions
from flexor.policies.rename import in_dataset


def value_findings(
    dataset: Dataset, before: Pipeline, rename_map: Mapping[str, str] | None = None
) -> list[Finding]:
    """Faults in the states and actions of a run. `before`: the processing of its batches."""
    faults: list[ValueFault] = []
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
                        faults += _faults(summarise(part, name), step, key, member)
    return [fault.finding for fault in faults]


def _faults(values: EpisodeValues, step: Normalize, key: str, member: int | None) -> list[ValueFault]:
    """`member`: the dataset whose statistics are used; None if they are not those of the values."""
    units, odd = other_units(values)
    scale = None if member is None else _scale(step, key, member)
    statistics = [] if scale is None else wrong_statistics(values, scale)
    return [*constant(values, key == ACTION), *units, *statistics, *outliers(values, odd)]


def _parts(dataset: Dataset, step: Normalize) -> list[tuple[int, Dataset]]:
    """What is normalised together: everything, or each dataset for itself."""
    if isinstance(step, NormalizeByDataset) and isinstance(dataset, MixedDataset):
        members = set(dataset.member_of(dataset.episodes.index).tolist())
        return [(number, dataset.only(number)) for number in sorted(members)]
    return [(0, dataset)]


def _has_relative_actions(before: Pipeline) -> bool:
    return any(isinstance(step, RelativeActions) and step.enabled for step in before.steps)


def _scale(step: Normalize, key: str, member: int) -> Scale | None:
    """How values are normalised; None if they are used as they are."""
    mode = step.mode(key)
    names = required_statistics(mode)
    if not names or key not in step.stats:
        return None
    if isinstance(step, NormalizeByDataset):
        first, second = (each[member] for each in step.stats_by_dataset[key])
    else:
        first, second = (step.stats[key][name] for name in names)
    low, high = (np.asarray(part.cpu(), np.float64).reshape(-1) for part in (first, second))
    if mode == "MEAN_STD":
        return Scale(low, high + step.eps, is_mean_std=True)
    return Scale((low + high) / 2, np.where(high == low, step.eps, high - low) / 2, is_mean_std=False)
