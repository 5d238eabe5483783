"""The result of a check: its findings, and the episodes without errors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexor.core.findings import ERROR, WARNING, Finding, Fix
from flexor.core.name_ranges import consecutive
from flexor.core.output_paths import make_parents


@dataclass
class CheckReport:
    """All findings, and the episodes that were checked."""

    root: Path
    deep: bool
    version: str = "unknown"
    checked: list[int] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    repair: str = ""
    """What a repair would do about its errors."""

    def error(self, kind: str, message: str, fix: str, **where: Any) -> None:
        self.findings.append(Finding(kind, message, [Fix(fix)], ERROR, **where))

    def warning(self, kind: str, message: str, fix: str, **where: Any) -> None:
        self.findings.append(Finding(kind, message, [Fix(fix)], WARNING, **where))

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == ERROR]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == WARNING]

    @property
    def ok(self) -> bool:
        return not self.errors

    @property
    def good_episodes(self) -> list[int]:
        """The checked episodes without errors of their own."""
        bad = {finding.episode for finding in self.errors}
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
            "repair": self.repair,
            "problems": [_to_json(finding) for finding in self.findings],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterable[str]:
        depth = "every frame decoded" if self.deep else "only packets read, nothing decoded"
        yield f"{self.root}: {self.version}, {counted(len(self.checked), 'episode')} checked ({depth})"
        for group in group_findings(self.findings):
            yield from _group_lines(group)
        good = self.good_episodes
        if self.ok:
            summary = f"no errors, {counted(len(self.warnings), 'warning')}"
            yield f"OK: {summary}" if self.warnings else "OK: no problems found"
            return
        counts = f"{counted(len(self.errors), 'error')}, {counted(len(self.warnings), 'warning')}"
        yield f"NOT OK: {counts}; {len(good)} of {len(self.checked)} episodes have no errors"
        if self.repair:
            yield self.repair


def _to_json(finding: Finding) -> dict[str, Any]:
    return {
        "severity": finding.severity,
        "kind": finding.name,
        "message": finding.evidence,
        "fix": finding.fix,
        "episode": finding.episode,
        "frame": finding.frame,
        "feature": finding.feature,
        "file": finding.file,
    }


def group_findings(findings: list[Finding]) -> list[list[Finding]]:
    """Group findings by name and feature, errors first: one broken file may affect 200 episodes."""
    groups: dict[tuple, list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: finding.severity):
        evidence = finding.evidence if finding.episode is None else None
        file = finding.file if evidence else None
        key = (finding.severity, finding.name, finding.feature, file, evidence)
        groups.setdefault(key, []).append(finding)
    return list(groups.values())


def _group_lines(group: list[Finding]) -> Iterable[str]:
    first = group[0]
    episodes = sorted({finding.episode for finding in group if finding.episode is not None})
    parts = [f"episode{'s' if len(episodes) > 1 else ''} {ranges(episodes)}"] if episodes else []
    files = list(dict.fromkeys(finding.file for finding in group if finding.file))
    parts += [first.feature] if first.feature else []
    parts += [f"{len(files)} files"] if len(files) > 1 else files
    where = ", ".join(parts) or "dataset"
    yield f"  {first.severity.upper():7} [{first.name}] {where}"
    messages = list(dict.fromkeys(finding.evidence for finding in group))
    for message in messages[:3]:
        yield f"          {message}"
    if len(messages) > 3:
        yield f"          ... and {len(messages) - 3} similar ones"
    yield f"          -> {first.fix}"


def ranges(numbers: list[int]) -> str:
    """0, 1, 2, 5 -> "0-2, 5"; the list is truncated after ten parts."""
    parts = consecutive(numbers)
    listing = [str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts[:10]]
    more = f" and {sum(map(len, parts[10:]))} more" if len(parts) > 10 else ""
    return ", ".join(listing) + more


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
