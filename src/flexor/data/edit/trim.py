"""Finds idle beginnings and ends of episodes: the robot stays where it is, and is told to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexor.core.batch import ACTION, STATE
from flexor.core.errors import ConfigError
from flexor.data.check.report import counted
from flexor.data.edit.language import has_events
from flexor.data.edit.report import LISTED_EPISODES
from flexor.data.edit.source import FLAGS_AT_END, EditSource, Part
from flexor.data.format.schema import EVENTS, LANGUAGE

SMALLEST_STEPS = 10
"""A value whose range is less than this many of its average steps is noise, not motion."""

RARE = 0.05
"""If 98 % of all values are within this part of the full range, the value moves rarely, and the full range counts."""


@dataclass(frozen=True)
class TrimSettings:
    """What counts as idle."""

    threshold: float = 0.02
    """Smallest motion, as a fraction of each value's range in the dataset."""

    keep: float = 0.5
    """Seconds of idle frames that stay before and after the motion."""

    features: Sequence[str] | None = None
    """The values that show motion; None: state and action, as far as there are any."""


@dataclass(frozen=True)
class Trim:
    """An episode, and what is cut from it."""

    part: Part
    moves: bool = True
    """Whether the robot moves at all; if not, nothing is cut."""

    @property
    def at_start(self) -> int:
        return self.part.first

    @property
    def at_end(self) -> int:
        return self.part.plan.length - self.part.end


def trimmed(parts: Sequence[Part], settings: TrimSettings, selected: set[int]) -> list[Trim]:
    """All episodes, the selected ones without idle beginnings and ends."""
    names = _motion_features(parts[0].source, settings)
    motions = [_values(part, names) for part in parts]
    scale = motion_scale(motions)
    return [
        _trim(part, motion * scale, settings) if part.plan.episode.index in selected else Trim(part)
        for part, motion in zip(parts, motions)
    ]


def _motion_features(source: EditSource, settings: TrimSettings) -> list[str]:
    """The features that show motion. Wrong settings are an error."""
    assert source.plan is not None
    columns = source.plan.columns
    numeric = [name for name in columns.stored if columns.feature(name).is_numeric]
    names = [n for n in (STATE, ACTION) if n in numeric] if settings.features is None else settings.features
    unknown = [name for name in names if name not in numeric]
    if unknown or not names:
        lacking = ", ".join(unknown) or f"{STATE} or {ACTION}"
        raise ConfigError(
            f"{source.root} has no {lacking}. Name the values that show motion with --features; it has "
            f"{', '.join(numeric)}."
        )
    if not 0 < settings.threshold < 1:
        raise ConfigError(f"--threshold={settings.threshold:g}: give a fraction of the range, such as 0.02.")
    if settings.keep < 0:
        raise ConfigError(f"--keep={settings.keep:g}: give a number of seconds, 0 or more.")
    return list(names)


def _values(part: Part, names: Sequence[str]) -> np.ndarray:
    """The values that show motion. [T, D]"""
    columns = part.source.columns(part.plan, names)
    return np.concatenate(
        [columns[name].reshape(part.plan.length, -1).astype(np.float64) for name in names], 1
    )


def motion_scale(motions: Sequence[np.ndarray]) -> np.ndarray:
    """What turns values into fractions of their range; 0 for values that never move or only tremble. [D]"""
    values = np.concatenate(motions)
    low, high = np.quantile(values, [0.01, 0.99], axis=0)
    full, span = np.ptp(values, axis=0), high - low
    span = np.where(span < RARE * full, full, span)
    steps = np.concatenate([np.abs(np.diff(motion, axis=0)) for motion in motions])
    step = steps.mean(axis=0) if len(steps) else np.zeros_like(span)
    moving = (span > SMALLEST_STEPS * step) & (span > 1e-9)
    return np.where(moving, 1 / np.where(moving, span, 1), 0)


def motion_span(motion: np.ndarray, threshold: float) -> tuple[int, int] | None:
    """From the last frame with the start's values to the first with the end's, one past it; None if it never moves.

    `motion` [T, D] is in fractions of the range.
    """
    started = np.flatnonzero((np.abs(motion - motion[0]) > threshold).any(axis=1))
    ended = np.flatnonzero((np.abs(motion - motion[-1]) > threshold).any(axis=1))
    if not len(started):
        return None
    last = ended[-1] if len(ended) else started[-1]
    return int(started[0]) - 1, int(last) + 2


def _trim(part: Part, motion: np.ndarray, settings: TrimSettings) -> Trim:
    span = motion_span(motion, settings.threshold)
    if span is None:
        return Trim(part, moves=False)
    assert part.source.plan is not None
    margin = round(settings.keep * part.source.plan.fps)
    events = _events(part)
    first, end = min([span[0], *events]), max([span[1], *(frame + 1 for frame in events)])
    return Trim(part.cut(max(first - margin, 0), min(end + margin, part.plan.length)))


def _events(part: Part) -> list[int]:
    """The first and the last frame where something happens that must not be lost: a reward, an annotation."""
    assert part.source.plan is not None
    columns = part.source.plan.columns
    names = [n for n in columns.stored if n.startswith("next.") and n not in FLAGS_AT_END]
    names = [n for n in names if columns.feature(n).is_numeric]
    spoken = [n for n in columns.stored if n == EVENTS and columns.features[n]["dtype"] == LANGUAGE]
    frames: list[int] = []
    for name, values in part.source.columns(part.plan, [*names, *spoken]).items():
        if name == EVENTS:
            frames += np.flatnonzero(has_events(values)).tolist()
            continue
        flat = values.reshape(part.plan.length, -1)
        changes = np.flatnonzero((flat[1:] != flat[:-1]).any(axis=1))
        frames += [*changes.tolist(), *(changes + 1).tolist()]
    return [min(frames), max(frames)] if frames else []


def describe_trims(trims: Sequence[Trim], fps: float, dry_run: bool) -> tuple[list[str], dict[str, Any]]:
    """Lines for people, and fields for programs."""
    cut = [trim for trim in trims if trim.at_start or trim.at_end]
    lines = [_line(trim, fps) for trim in cut[:LISTED_EPISODES]]
    if len(cut) > LISTED_EPISODES:
        lines.append(f"... and {len(cut) - LISTED_EPISODES} more episodes; --json lists all")
    still = [trim.part.plan.episode.index for trim in trims if not trim.moves]
    if still:
        listing = ", ".join(map(str, still[:20])) + (" ..." if len(still) > 20 else "")
        lines.append(f"no motion in {counted(len(still), 'episode')}, nothing is cut: {listing}")
    frames = sum(trim.at_start + trim.at_end for trim in trims)
    total = sum(trim.part.plan.length for trim in trims)
    would = "would be cut" if dry_run else "cut"
    lines.append(
        f"{frames} of {total} frames {would} ({frames / total:.1%}) from {len(cut)} of {len(trims)} episodes"
    )
    return lines, {"cut_frames": frames, "of_frames": total, "episodes_cut": len(cut), "never_move": still}


def _line(trim: Trim, fps: float) -> str:
    start, end = trim.at_start, trim.at_end
    return (
        f"episode {trim.part.plan.episode.index}: {counted(start, 'frame')} ({start / fps:.2f} s) at the start, {end} "
        f"({end / fps:.2f} s) at the end; {trim.part.length} stay"
    )
