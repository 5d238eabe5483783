"""The report of a repair: its changes to each episode and to the dataset as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flexor.data.check.layout import EpisodeEntry
from flexor.data.check.report import CheckReport, counted, ranges


@dataclass(frozen=True)
class RepairClip:
    """An episode's frames in a video file: one per row, starting at frame `first`."""

    file: str
    first: int
    length: int
    start: float
    """The first frame's time in the file, in seconds."""

    certain: bool
    """Whether the file, or the episode's span of it, has exactly one frame per row of the episode."""

    size: tuple[int, int]  # height, width
    copied_whole: bool = False
    """Whether the frames can't be cut out, so the file is copied unchanged."""

    delay: int = 0
    """Largest number of frames that are decoded before they are shown."""

    steady: bool = True
    """Whether the frames are already 1/fps apart."""

    @property
    def end(self) -> int:
        return self.first + self.length


@dataclass
class EpisodePlan:
    """One episode of the original, and its repair."""

    episode: EpisodeEntry
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, int))
    """Its rows in the data file, in recording order."""

    clock: np.ndarray = field(default_factory=lambda: np.empty(0))  # [n] seconds, as recorded
    task_index: np.ndarray | None = None  # [n]; None if there is no such column
    counted: bool = False
    """Whether frame_index shows that no row is missing."""

    clips: dict[str, RepairClip] = field(default_factory=dict)
    repairs: list[str] = field(default_factory=list)
    """What was repaired, in the same words for every episode with the same problem."""

    reason: str | None = None
    """Why it is left out; None if it is included."""

    new: int | None = None
    """Its index in the new dataset."""

    @property
    def length(self) -> int:
        return len(self.rows)


@dataclass
class RepairReport:
    """The repair of each episode, and the check of the result."""

    root: Path
    out: Path
    version: str
    episodes: list[EpisodePlan]
    notes: list[str]
    not_selected: int = 0
    dry_run: bool = False
    check: CheckReport | None = None

    @property
    def ok(self) -> bool:
        return self.check is None or self.check.ok

    @property
    def included(self) -> list[EpisodePlan]:
        return [plan for plan in self.episodes if plan.reason is None]

    @property
    def excluded(self) -> list[EpisodePlan]:
        return [plan for plan in self.episodes if plan.reason is not None]

    def to_json(self) -> dict[str, Any]:
        return {
            "root": str(self.root),
            "out": str(self.out),
            "version": self.version,
            "dry_run": self.dry_run,
            "dataset": self.notes,
            "episodes": [_episode_json(plan) for plan in self.episodes],
            "kept": len(self.included),
            "left_out": len(self.excluded),
            "not_asked_for": self.not_selected,
            "frames": sum(plan.length for plan in self.included),
            "check": None if self.check is None else self.check.to_json(),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterable[str]:
        would = "would be " if self.dry_run else ""
        yield f"{self.root} ({self.version}) -> {self.out} (v3.0)"
        for note in self.notes:
            yield f"  dataset: {note}"
        for text, plans in _grouped((change, plan) for plan in self.included for change in plan.repairs):
            yield f"  {_episodes(plans)}: {text}"
        for text, plans in _grouped((plan.reason or "", plan) for plan in self.excluded):
            yield f"  LEFT OUT {_episodes(plans)}: {text}"
        frames = sum(plan.length for plan in self.included)
        repaired = sum(bool(plan.repairs) for plan in self.included)
        not_selected = f", {self.not_selected} not selected" if self.not_selected else ""
        yield (
            f"{counted(len(self.included), 'episode')} {would}kept ({frames} frames), {repaired} of them repaired; "
            f"{len(self.excluded)} left out{not_selected}"
        )
        if self.excluded and not self.dry_run:
            yield "Episodes are renumbered; --json lists the old and new indices."
        if self.check is not None:
            yield str(self.check)


def _episode_json(plan: EpisodePlan) -> dict[str, Any]:
    outcome = {"done": plan.repairs} if plan.reason is None else {"reason": plan.reason}
    return {"episode": plan.episode.index, "new": plan.new, "length": plan.length} | outcome


def _grouped(pairs: Iterable[tuple[str, EpisodePlan]]) -> list[tuple[str, list[EpisodePlan]]]:
    groups: dict[str, list[EpisodePlan]] = {}
    for text, plan in pairs:
        groups.setdefault(text, []).append(plan)
    return list(groups.items())


def _episodes(plans: list[EpisodePlan]) -> str:
    numbers = sorted({plan.episode.index for plan in plans})
    return f"episode{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"
