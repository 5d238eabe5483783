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
from flexor.data.format.flat_names import flat_names


def check_values(layout: Layout, tables: Tables, report: CheckReport) -> None:
    """Report the faults of states and actions, for each episode that has them."""
    for name in tables.parts:
        values = _summarised(layout, tables, name)
        with np.errstate(all="ignore"):  # values near the limits of float64
            units, odd = other_units(values)
            faults = [*constant(values, name == ACTION), *units, *outliers(values, odd)]
        for fault in faults:
            add_fault(fault, name, report)


def add_fault(fault: ValueFault, feature: str, report: CheckReport) -> None:
    kind = fault.name.replace(" ", "-")
    for episode, frame in fault.frames.items():
        report.warning(kind, fault.evidence, fault.fix, episode=episode, frame=frame, feature=feature)
    if not fault.frames:
        report.warning(kind, fault.evidence, fault.fix, feature=feature)


def _summarised(layout: Layout, tables: Tables, name: str) -> EpisodeValues:
    rows, lengths = tables.rows(name), [len(part) for part in tables.parts[name].values()]
    index = np.array([*tables.parts[name]], np.int64)
    labels = flat_names(layout.features[name].names, rows.shape[1]) or []
    return summarise_rows(name, labels, EpisodeNames(index), rows, np.cumsum([0, *lengths[:-1]]))
