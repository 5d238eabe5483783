"""The report of an edit: what is in each new dataset, and the check of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexor.data.check.report import CheckReport, counted, ranges
from flexor.data.edit.source import EditSource, Part

LISTED_EPISODES = 30  # in the text; --json has all


@dataclass
class NewDataset:
    """A dataset that is written."""

    folder: Path
    parts: Sequence[Part]
    check: CheckReport | None = None

    @property
    def frames(self) -> int:
        return sum(part.length for part in self.parts)

    def tasks(self) -> dict[str, int]:
        """How many episodes have each task."""
        counts: dict[str, int] = {}
        for part in self.parts:
            for task in part.listed_tasks():
                counts[task] = counts.get(task, 0) + 1
        return counts

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "episodes": len(self.parts),
            "frames": self.frames,
            "tasks": self.tasks(),
            "from": [_part_json(new, part) for new, part in enumerate(self.parts)],
            "check": None if self.check is None else self.check.to_json(),
        }


@dataclass
class EditReport:
    """All datasets that an edit writes."""

    verb: str
    datasets: list[NewDataset]
    notes: list[str] = field(default_factory=list)
    dry_run: bool = False
    lines: list[str] = field(default_factory=list)
    """What this verb says about episodes."""

    details: dict[str, Any] = field(default_factory=dict)
    """What this verb says to programs."""

    @property
    def ok(self) -> bool:
        return all(dataset.check is None or dataset.check.ok for dataset in self.datasets)

    def to_json(self) -> dict[str, Any]:
        datasets = [dataset.to_json() for dataset in self.datasets]
        common = {"verb": self.verb, "dry_run": self.dry_run, "ok": self.ok, "notes": self.notes}
        return common | self.details | {"datasets": datasets}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterable[str]:
        yield from self.lines
        for dataset in self.datasets:
            would = "would have" if self.dry_run else "has"
            size = f"{counted(len(dataset.parts), 'episode')} ({counted(dataset.frames, 'frame')})"
            yield f"{dataset.folder} {would} {size}: {_origin(dataset)}"
        yield from (f"  {note}" for note in self.notes)
        for dataset in self.datasets:
            if dataset.check is not None:
                yield str(dataset.check)


def _origin(dataset: NewDataset) -> str:
    """Which episodes of which datasets it has."""
    origins: dict[EditSource, list[int]] = {}
    for part in dataset.parts:
        origins.setdefault(part.source, []).append(part.plan.episode.index)
    return "; ".join(f"{ranges(sorted(episodes))} of {source.root}" for source, episodes in origins.items())


def _part_json(new: int, part: Part) -> dict[str, Any]:
    return {
        "episode": new,
        "root": str(part.source.root),
        "of": part.plan.episode.index,
        "frames": part.length,
        "cut_at_start": part.first,
        "cut_at_end": part.plan.length - part.end,
    }
