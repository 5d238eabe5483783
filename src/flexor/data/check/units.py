"""Episodes that were recorded in other units than the rest, such as degrees among radians.

A joint that rests is no evidence: its values are small in any unit. So only episodes count in which the joint moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flexor.data.check.values import EpisodeValues, ValueFault
from flexor.runs.text import figure

UNITS = {180 / np.pi: "degrees and radians", 100.0: "percent and fractions", 1000.0: "m and mm"}
SMALLEST_MOTION = {"degrees and radians": 0.05, "percent and fractions": 0.1, "m and mm": 0.02}
"""In the smaller values' unit. A joint that moves less may as well be at rest."""
UNIT_GAP = 10.0  # factor between episodes of one unit and those of another
IDLE = 1e-4  # of the largest movement: an episode in which a joint moves less says nothing about its unit
NOISE = 2.1  # a range that noise reaches, in steps from frame to frame times the root of 2 log(frames)
FEW_LEVELS = 3.5  # a range in smallest steps up to which a signal switches rather than moves
SWITCHES = "percent and fractions"  # a gripper that is open or closed; other units have no switches


def other_units(values: EpisodeValues) -> tuple[list[ValueFault], np.ndarray]:
    """Episodes in other units than the rest; and which episodes and dimensions these are, [E, D]."""
    odd = np.zeros(values.low.shape, bool)
    faults: list[ValueFault] = []
    splits: dict[bytes, list[int]] = {}
    moving = _moving(values)
    for number in np.flatnonzero(~values.is_constant).tolist():
        larger = _split(values.size[:, number], (values.high - values.low)[:, number], moving[:, number])
        if larger is not None:
            splits.setdefault(larger.tobytes(), []).append(number)
    for key, numbers in splits.items():
        kind = np.frombuffer(key, np.int8)  # 1: larger, -1: smaller, 0: says nothing
        unit = _unit(values, numbers, kind)
        if unit is None:
            continue
        few = kind == (1 if (kind == 1).sum() <= (kind == -1).sum() else -1)
        odd[np.ix_(few, numbers)] = True
        faults.append(_fault(values, numbers, few, *unit))
    return faults, odd


def _moving(values: EpisodeValues) -> np.ndarray:
    """Where a joint follows a path or switches, rather than trembling about a place of rest. [E, D]"""
    moved = values.high - values.low
    steps, _ = _steps(values)
    noise = NOISE * np.sqrt(2 * np.log(np.maximum(values.length, 2)))
    return (moved > noise[:, None] * steps) | _switches(values)


def _switches(values: EpisodeValues) -> np.ndarray:
    """Where a dimension has only a few levels. [E, D]"""
    return values.high - values.low <= FEW_LEVELS * _steps(values)[1]


def _steps(values: EpisodeValues) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the smallest change from a frame to the next; changes of zero have no size. [E, D] each"""
    change = np.abs(np.diff(values.rows.astype(np.float64), axis=0, append=values.rows[-1:]))
    change[values.start[1:] - 1] = 0.0  # from an episode to the next
    change = np.nan_to_num(change, nan=0.0, posinf=0.0)
    mean = np.add.reduceat(change, values.start) / np.maximum(values.length - 1, 1)[:, None]
    return mean, np.fmin.reduceat(np.where(change > 0, change, np.inf), values.start)


def _split(size: np.ndarray, moved: np.ndarray, moving: np.ndarray) -> np.ndarray | None:
    """Episodes in two groups far apart, of which one both moves further and has larger values. int8 [E]"""
    says = (moved > IDLE * np.nanmax(moved)) & moving
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
    moved = values.high - values.low
    for part in (values.size, moved):
        groups = (np.nanmedian(part[kind == side][:, numbers], axis=0) for side in (1, -1))
        larger, smaller = groups
        ratios.append(np.log(larger / smaller))
    sizes, moves = ratios
    several = len(numbers) > 2
    nearest = min(UNITS, key=lambda factor: abs(float(np.median(sizes)) - np.log(factor)))
    off = max(abs(float(np.median(each)) - np.log(nearest)) for each in (sizes, moves))
    spread = float(np.median(np.abs(sizes - np.median(sizes))))
    if off > np.log(1.6 if several else 1.25) or spread > np.log(1.6):
        return None
    smaller_part = np.ix_(kind == -1, numbers)
    if np.median(moved[smaller_part]) < SMALLEST_MOTION[UNITS[nearest]]:
        return None
    if UNITS[nearest] != SWITCHES and np.median(_switches(values)[smaller_part]) > 0:
        return None
    return float(np.exp(np.median(sizes))), UNITS[nearest]


def _fault(
    values: EpisodeValues, numbers: Sequence[int], few: np.ndarray, factor: float, units: str
) -> ValueFault:
    first = numbers[0]
    size_here = float(values.size[few, first].max())
    size_elsewhere = float(np.median(values.size[~few, first]))
    size = "larger" if size_here > size_elsewhere else "smaller"
    which = np.flatnonzero(few)
    several = len(numbers) > 1
    subject = f"{values.dimension(first)}{f' and {len(numbers) - 1} more' if several else ''}"
    all_of_them = f". All of them: {values.dimensions(numbers)}" if several else ""
    convert = "convert these episodes, then compute statistics with `flexor data stats DIR --write`; or leave them out"
    episodes = values.names.index[which].tolist()
    evidence = (
        f"{subject} {'are' if several else 'is'} about {factor:.0f} times {size} in "
        f"{values.names.at(which)} than in the others (up to {figure(size_here)}, usually "
        f"{figure(size_elsewhere)}). It looks like {units}{all_of_them}"
    )
    fix = f"{convert}: {values.names.exclude(episodes)}"
    return ValueFault("mixed units", evidence, fix, dict.fromkeys(episodes, 0))
