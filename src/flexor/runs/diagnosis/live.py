"""The verdict of a run while it trains: from each line of its log, without flapping between two verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexor.runs.diagnosis.figures import Reports, figures_of, number
from flexor.runs.diagnosis.rules import diagnose
from flexor.runs.diagnosis.verdict import Diagnosis, for_line

UPDATE_S = 2.0  # of training, between two diagnoses
CONFIRMATIONS = 2  # diagnoses in a row that must agree on a new verdict


class LiveDiagnosis:
    def __init__(self, config: Mapping[str, Any], record: Mapping[str, Any]):
        batch = number(config.get("global_batch_size"))
        self.config, self.record = config, record
        self.reports = Reports(int(batch) if batch and batch > 0 else None)
        self.now = Diagnosis()
        self._trained = 0.0  # seconds since the last diagnosis
        self._candidate: tuple[str, int] = ("", 0)

    def add(self, line: Mapping[str, Any]) -> Diagnosis | None:
        """The diagnosis, if this line changed the verdict."""
        self._trained += self.reports.add(line)
        if not self.reports.enough or self._trained < UPDATE_S:
            return None
        self._trained = 0.0
        previous = self.now.verdict.name if self.now.verdict else None
        diagnosis = diagnose(figures_of(self.reports, self.config, self.record), previous)
        assert diagnosis.verdict is not None
        if diagnosis.verdict.name == previous:
            self.now, self._candidate = diagnosis, ("", 0)
            return None
        name, count = self._candidate
        count = count + 1 if name == diagnosis.verdict.name else 1
        self._candidate = diagnosis.verdict.name, count
        if count < CONFIRMATIONS:
            return None
        self.now, self._candidate = diagnosis, ("", 0)
        return diagnosis

    def for_line(self) -> dict[str, str] | None:
        return for_line(self.now.verdict) if self.now.verdict else None
