"""What the rules find: a verdict, its evidence in figures, and changes that would help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ALARM = 0.15  # share of the time that something must cost to be a verdict
ROOT = 2.0  # a cause counts this much more than what follows from it, such as waiting for data
WORTH = 1.05  # a change must make a run this many times as fast to be suggested


@dataclass(frozen=True)
class Suggestion:
    """A change: its flags, if it has any, what it does, and how many times as fast the run would be."""

    why: str
    flag: str | None = None
    speedup: float | None = None
    planned: bool = False
    """The planner computed the speedup; otherwise it follows from the time that would no longer be lost."""

    @property
    def text(self) -> str:
        gain = ""
        if self.speedup is not None:
            most = "" if self.planned else "up to "
            gain = f": {most}{self.speedup:.1f} times as fast" + (" by the plan" if self.planned else "")
        return (f"{self.flag} {self.why}" if self.flag else self.why) + gain


@dataclass
class Finding:
    verdict: str
    cost: float
    """Share of the time that would be saved without it. 0: nothing is wrong."""
    evidence: str
    figures: list[tuple[str, str]] = field(default_factory=list)
    """Figures by name, with their units."""
    changes: list[Suggestion] = field(default_factory=list)
    cause: bool = False
    """It is why other things take long."""

    @property
    def weight(self) -> float:
        return self.cost * (ROOT if self.cause else 1.0)

    def for_line(self) -> dict[str, str]:
        """As in a line of the metrics: short."""
        change = self.changes[0].text if self.changes else ""
        return {"verdict": self.verdict, "evidence": self.evidence, "change": change[:1].upper() + change[1:]}

    def to_json(self) -> dict[str, Any]:
        changes = [
            {"flag": one.flag, "why": one.why, "speedup": one.speedup, "planned": one.planned}
            for one in self.changes
        ]
        return {
            **self.for_line(),
            "cost": round(self.cost, 4),
            "figures": dict(self.figures),
            "changes": changes,
        }


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
        others = [finding.to_json() for finding in self.findings[1:]]
        about = {"seconds": round(self.seconds, 3), "steps": self.steps, "healthy": self.healthy}
        return {**self.verdict.to_json(), **about, "others": others}


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def faster(after: float) -> float | None:
    """How many times as fast, if a step takes this share of its time afterwards; None if that is not worth it."""
    speedup = 1 / max(after, 0.02)
    return speedup if speedup >= WORTH else None
