"""The verdict of a run while it trains: from each line of its log, without flapping between two verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexor.runs.diagnosis.figures import Reports, figures_of, number
from flexor.runs.diagnosis.rules import diagnose
from flexor.runs.diagnosis.verdict import Diagnosis, for_line

LOOK_EVERY_S = 2.0  # of training, between two looks at the figures
LOOKS = 2  # in a row that must find the same new verdict


class LiveDiagnosis:
    def __init__(self, config: Mapping[str, Any], record: Mapping[str, Any]):
        batch = number(config.get("global_batch_size"))
        self.config, self.record = config, record
        self.reports = Reports(int(batch) if batch and batch > 0 else None)
        self.now = Diagnosis()
        self._trained = 0.0  # seconds, since the last look
        self._candidate: tuple[str, int] = ("", 0)

    def add(self, line: Mapping[str, Any]) -> Diagnosis | None:
        """The diagnosis, if this line changed the verdict."""
        self._trained += self.reports.add(line)
        if not self.reports.enough or self._trained < LOOK_EVERY_S:
            return None
        self._trained = 0.0
        known = self.now.verdict.what if self.now.verdict else None
        found = diagnose(figures_of(self.reports, self.config, self.record), known)
        assert found.verdict is not None
        if found.verdict.what == known:
            self.now, self._candidate = found, ("", 0)
            return None
        name, looks = self._candidate
        looks = looks + 1 if name == found.verdict.what else 1
        self._candidate = found.verdict.what, looks
        if looks < LOOKS:
            return None
        self.now, self._candidate = found, ("", 0)
        return found

    def for_line(self) -> dict[str, str] | None:
        return for_line(self.now.verdict) if self.now.verdict else None
