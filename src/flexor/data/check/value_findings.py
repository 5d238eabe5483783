"""The part of a check about values: what a run would say about the states and actions at its start."""

from __future__ import annotations

import numpy as np

from flexor.core.batch import ACTION
from flexor.data.check.episode_names import EpisodeNames
from flexor.data.check.layout import Layout
from flexor.data.check.report import CheckReport
from flexor.data.check.tables import Tables
from flexor.data.check.units import other_units
from flexor.data.check.values import EpisodeValues, ValueFault, constant, outliers, summarise_rows
from flexor.data.check.wrong_statistics import Scale, wrong_statistics
from flexor.data.format.flat_names import flat_names
from flexor.data.format.stats import NEEDED_STATS


def check_values(layout: Layout, tables: Tables, report: CheckReport) -> None:
    """Report the faults of states and actions, for each episode that has them."""
    for name in tables.parts:
        values = _summarised(layout, tables, name)
        with np.errstate(all="ignore"):  # values near the limits of float64
            units, odd = other_units(values)
            faults = [*constant(values, name == ACTION), *units, *outliers(values, odd)]
            statistics = wrong_recorded_statistics(layout, values, report)
        for fault in faults:
            add_fault(fault.name.replace(" ", "-"), fault, name, report)
        for fault in statistics[:1]:
            add_fault("stats-wrong", fault, name, report)


def wrong_recorded_statistics(layout: Layout, values: EpisodeValues, report: CheckReport) -> list[ValueFault]:
    """Recorded statistics that a run would complain about, whichever of them it normalises by."""
    stats = layout.stats.get(values.name, {})
    is_named = any(f.feature == values.name and f.name.startswith("stats-") for f in report.findings)
    if is_named or not {*NEEDED_STATS} <= stats.keys() or len(values.episodes) != len(layout.episodes):
        return []
    mean, std, low, high = (np.ravel(stats[key]).astype(np.float64) for key in ("mean", "std", "min", "max"))
    scales = [
        Scale(mean, std, is_mean_std=True),
        Scale((low + high) / 2, (high - low) / 2, is_mean_std=False),
    ]
    return [fault for scale in scales for fault in wrong_statistics(values, scale)]


def add_fault(kind: str, fault: ValueFault, feature: str, report: CheckReport) -> None:
    for episode, frame in fault.frames.items():
        report.warning(kind, fault.evidence, fault.fix, episode=episode, frame=frame, feature=feature)
    if not fault.frames:
        report.warning(kind, fault.evidence, fault.fix, feature=feature)


def _summarised(layout: Layout, tables: Tables, name: str) -> EpisodeValues:
    rows, lengths = tables.rows(name), [len(part) for part in tables.parts[name].values()]
    index = np.array([*tables.parts[name]], np.int64)
    labels = flat_names(layout.features[name].names, rows.shape[1]) or []
    return summarise_rows(name, labels, EpisodeNames(index), rows, np.cumsum([0, *lengths[:-1]]))
