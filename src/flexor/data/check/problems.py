"""The result of a check: a list of problems, and the episodes without errors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flexor.core.output_paths import make_parents


@dataclass(frozen=True)
class Problem:
    """One problem, with its severity and how to fix it."""

    severity: str
    """An "error" makes training fail or learn from wrong data; with a "warning", training is possible."""

    kind: str
    """A short, stable name for scripts, such as video-missing or not-finite."""

    message: str
    fix: str
    episode: int | None = None
    """The affected episode; None if the problem concerns the whole dataset."""

    feature: str | None = None
    file: str | None = None


@dataclass
class CheckReport:
    """All problems found, and the episodes that were checked."""

    root: Path
    deep: bool
    version: str = "unknown"
    checked: list[int] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def error(self, kind: str, message: str, fix: str, **where: Any) -> None:
        self.problems.append(Problem("error", kind, message, fix, **where))

    def warning(self, kind: str, message: str, fix: str, **where: Any) -> None:
        self.problems.append(Problem("warning", kind, message, fix, **where))

    @property
    def errors(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "error"]

    @property
    def warnings(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "warning"]

    @property
    def ok(self) -> bool:
        return not self.errors

    @property
    def good_episodes(self) -> list[int]:
        """The checked episodes without errors of their own."""
        bad = {problem.episode for problem in self.errors}
        return [episode for episode in self.checked if episode not in bad]

    def write_good_episodes(self, path: str | Path) -> None:
        """Write the list that `--dataset.episodes=@path` reads."""
        make_parents(Path(path)).write_text(json.dumps(self.good_episodes) + "\n", encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
        return {
            "root": str(self.root),
            "version": self.version,
            "deep": self.deep,
            "ok": self.ok,
            "errors": len(self.errors),
            "warnings": len(self.warnings),
            "episodes_checked": len(self.checked),
            "good_episodes": self.good_episodes,
            "problems": [asdict(problem) for problem in self.problems],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterable[str]:
        depth = "every frame decoded" if self.deep else "only packets read, nothing decoded"
        yield f"{self.root}: {self.version}, {len(self.checked)} episodes checked ({depth})"
        for group in group_problems(self.problems):
            yield from _group_lines(group)
        good = self.good_episodes
        if self.ok:
            warned = f"no errors, {_count(len(self.warnings), 'warning')}"
            yield f"OK: {warned}" if self.warnings else "OK: no problems found"
            return
        found = f"{_count(len(self.errors), 'error')}, {_count(len(self.warnings), 'warning')}"
        yield f"NOT OK: {found}; {len(good)} of {len(self.checked)} episodes have no errors"
        yield f"`flexor data repair {self.root} NEW_FOLDER` repairs what it can and leaves out the other episodes"


def group_problems(problems: list[Problem]) -> list[list[Problem]]:
    """Group problems by kind and feature, errors first: one broken file may affect 200 episodes."""
    groups: dict[tuple, list[Problem]] = {}
    for problem in sorted(problems, key=lambda problem: problem.severity):
        whole = problem.message if problem.episode is None else None
        file = problem.file if whole else None
        key = (problem.severity, problem.kind, problem.feature, file, whole)
        groups.setdefault(key, []).append(problem)
    return list(groups.values())


def _group_lines(group: list[Problem]) -> Iterable[str]:
    first = group[0]
    episodes = sorted({problem.episode for problem in group if problem.episode is not None})
    place = [f"episode{'s' if len(episodes) > 1 else ''} {ranges(episodes)}"] if episodes else []
    files = list(dict.fromkeys(problem.file for problem in group if problem.file))
    place += [first.feature] if first.feature else []
    place += [f"{len(files)} files"] if len(files) > 1 else files
    where = ", ".join(place) or "dataset"
    yield f"  {first.severity.upper():7} [{first.kind}] {where}"
    messages = list(dict.fromkeys(problem.message for problem in group))
    for message in messages[:3]:
        yield f"          {message}"
    if len(messages) > 3:
        yield f"          ... and {len(messages) - 3} similar ones"
    yield f"          -> {first.fix}"


def ranges(numbers: list[int]) -> str:
    """0, 1, 2, 5 -> "0-2, 5"; the list is truncated after ten parts."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in parts[:10]]
    more = f" and {sum(b - a + 1 for a, b in parts[10:])} more" if len(parts) > 10 else ""
    return ", ".join(shown) + more


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
