"""A diagnosis: what the rules found, the verdict first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flexor.core.findings import Finding

ALARM = 0.15  # share of the time that a finding must cost to be a verdict
ROOT = 2.0  # a cause counts this much more than its consequences, such as waiting for data
WORTH = 1.05  # a change must make a run this many times as fast to be suggested


@dataclass
class Diagnosis:
    """All findings, the verdict first. None if there are too few reports."""

    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0

    @property
    def verdict(self) -> Finding | None:
        return self.findings[0] if self.findings else None

    @property
    def healthy(self) -> bool:
        return self.verdict is not None and self.verdict.cost == 0

    def to_json(self) -> dict[str, Any]:
        if self.verdict is None:
            return {"verdict": None}
        other_findings = [_to_json(finding) for finding in self.findings[1:]]
        about = {"seconds": round(self.seconds, 3), "steps": self.steps, "healthy": self.healthy}
        return {**_to_json(self.verdict), **about, "others": other_findings}


def weight(finding: Finding) -> float:
    """The rank of a finding among others."""
    return finding.cost * (ROOT if finding.is_cause else 1.0)


def for_line(finding: Finding) -> dict[str, str]:
    """As in a line of the metrics: short."""
    change = finding.fix[:1].upper() + finding.fix[1:]
    return {"verdict": finding.name, "evidence": finding.evidence, "change": change}


def _to_json(finding: Finding) -> dict[str, Any]:
    changes = [
        {"flag": fix.flag, "why": fix.description, "speedup": fix.speedup, "planned": fix.planned}
        for fix in finding.fixes
    ]
    figures = dict(finding.figures)
    return {**for_line(finding), "cost": round(finding.cost, 4), "figures": figures, "changes": changes}


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def faster(after: float) -> float | None:
    """The speedup if a step takes the share `after` of its time; None if it is not worth a change."""
    speedup = 1 / max(after, 0.02)
    return speedup if speedup >= WORTH else None
