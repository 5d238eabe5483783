"""The diagnosis of a run from its folder, while it trains or afterwards."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexor.core.console import table
from flexor.core.findings import Finding
from flexor.core.run_files import METRICS
from flexor.core.text import one_line
from flexor.runs.diagnosis.figures import MIN_REPORTS, MIN_S, Figures, Reports
from flexor.runs.diagnosis.rules import diagnose_lines
from flexor.runs.diagnosis.verdict import Diagnosis
from flexor.runs.jsonl import GrowingLines
from flexor.runs.reader import RunReader
from flexor.runs.state import STATUS, RunState
from flexor.runs.text import duration_text


@dataclass
class DiagnosedRun:
    state: RunState
    diagnosis: Diagnosis
    figures: Figures
    reports: Reports
    note: str | None = None
    """Why the planner has no estimates."""

    def to_json(self) -> dict[str, Any]:
        about = {"name": self.state.name, "folder": self.state.folder, "status": self.state.status}
        result = {**about, "step": self.state.step, **self.diagnosis.to_json()}
        if self.diagnosis.verdict is None:
            result["why_not"] = why_not(self.reports)
        result["health"] = self.state.health_json()
        return result | ({"note": self.note} if self.note else {})


def diagnose_run(folder: Path, name: str | None = None) -> DiagnosedRun:
    reader = RunReader(folder, name)
    reader.poll()
    lines: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        lines = GrowingLines(folder / METRICS).read()[1]
    return DiagnosedRun(reader.state(), *diagnose_lines(lines, reader.config, reader.record))


def why_not(reports: Reports) -> str:
    return (
        f"not enough reports yet: a verdict needs {MIN_REPORTS} reports of ordinary steps that together took "
        f"{MIN_S:g} s, and there are {len(reports.recent)} ({duration_text(reports.seconds)}). The first one after a "
        f"start, and those with an evaluation or a checkpoint, do not count"
    )


def render(runs: list[DiagnosedRun]) -> str:
    return "\n\n".join(_run_text(run) for run in runs)


def _run_text(run: DiagnosedRun) -> str:
    state, verdict = run.state, run.diagnosis.verdict
    head = f"{one_line(state.name)}: {STATUS[state.status]}, step {state.step:,}"
    if verdict is None:
        return "\n".join([head, f"{why_not(run.reports)}.", *_health_lines(state)])
    parts = [head, *_finding_lines(verdict)]
    if run.diagnosis.findings[1:]:
        parts.append("\nAlso:")
        for other in run.diagnosis.findings[1:]:
            parts += _finding_lines(other)
    parts += _health_lines(state)
    about = f"Figures of the last {duration_text(run.diagnosis.seconds)}, {run.diagnosis.steps} steps."
    parts.append(f"\n{about}" + (f" Note: {one_line(run.note)}" if run.note else ""))
    return "\n".join(parts)


def _health_lines(state: RunState) -> list[str]:
    """Findings about learning, and their fixes."""
    if not state.health:
        return []
    texts = [map(one_line, (finding.name, finding.evidence, finding.fix)) for finding in state.health]
    return ["\nLearning:", *(f"  {name}: {evidence}. {fix}." for name, evidence, fix in texts)]


def _finding_lines(finding: Finding) -> list[str]:
    lines = [f"{finding.name}: {one_line(finding.evidence)}."]
    if finding.figures:
        rows = table([(f"  {name}", one_line(value)) for name, value in finding.figures])
        lines += ["", rows]
    if finding.fixes:
        healthy = finding.cost == 0
        title = "What would make it faster still:" if healthy else "What helps, the most helpful first:"
        lines += ["", title, *(f"  {one_line(fix.text)}" for fix in finding.fixes)]
    return lines
