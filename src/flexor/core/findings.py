"""A finding: something that is wrong or slow, where, the figures that show it, and what to do about it.

`flexor data check` finds them in a dataset, a run in its metrics and inputs, `flexor diagnose` in where the time goes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ERROR, WARNING = "error", "warning"


@dataclass(frozen=True)
class Fix:
    """Something to do: the flags to set, if any, what they do, and how many times as fast the run would be."""

    description: str
    flag: str | None = None
    speedup: float | None = None
    planned: bool = False
    """The planner computed the speedup; otherwise it follows from the time that would no longer be lost."""

    @property
    def text(self) -> str:
        gain = ""
        if self.speedup is not None:
            at_most = "" if self.planned else "up to "
            gain = f": {at_most}{self.speedup:.1f} times as fast" + (" by the plan" if self.planned else "")
        return (f"{self.flag} {self.description}" if self.flag else self.description) + gain


@dataclass
class Finding:
    name: str
    """A short, stable name: video-missing, loss spike, data-bound (decode)."""

    evidence: str
    fixes: list[Fix] = field(default_factory=list)
    """The most helpful first."""

    severity: str = WARNING
    """An "error" makes training fail or learn from wrong data."""

    episode: int | None = None
    """The affected episode; None if the finding concerns all of them."""

    frame: int | None = None
    """The frame of the episode at which it begins; None if it concerns all of them, or none."""

    feature: str | None = None
    file: str | None = None
    step: float | None = None
    """The step of training at which it began."""

    cost: float = 0.0
    """Share of the time that would be saved without it."""

    figures: list[tuple[str, str]] = field(default_factory=list)
    """Measured values by name, with their units."""

    is_cause: bool = False
    """Other findings follow from it."""

    @property
    def fix(self) -> str:
        return self.fixes[0].text if self.fixes else ""
