"""The last reports of a run as one set of figures: means over their time, and sums of what its loaders did.

Only reports of ordinary steps count: not the first one after a start, nor those whose time includes an evaluation or a
checkpoint. The times of these are summed separately over the run. Values that are missing or not numbers are left out:
old runs and other systems report less.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flexor.runs.diagnosis.verdict import ALARM

RATE = "samples_per_s"
WINDOW_S = 60.0  # how far back reports count
MIN_REPORTS, MIN_S = 3, 2.0  # fewer are not enough for a verdict
MERGED_S = 1.0  # shorter reports are merged: a run may log every step
LARGEST = 1e18  # no reported value is larger
MAX_PAUSED = 0.1  # share of the time: reports in which saving and evaluating took more do not count
PAUSES = ("checkpoint_s", "evaluation_s")
SUMMED = "loader."
NOT_SUMMED = ("loader.threads", "loader.source", "loader.cache")


def number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    return as_float if math.isfinite(as_float) and abs(as_float) < LARGEST else None


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values under one name each: system.cpu_own."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@dataclass
class Report:
    """One line of the metrics, or several that were merged."""

    seconds: float
    steps: float
    sums: dict[str, float]
    """Sums of loader values; other values times the seconds that they cover."""
    weights: dict[str, float]
    """Seconds that each value covers."""
    last: dict[str, Any]
    """The newest value of each name."""

    def add(self, other: Report) -> None:
        self.seconds += other.seconds
        self.steps += other.steps
        for totals, added in ((self.sums, other.sums), (self.weights, other.weights)):
            for name, value in added.items():
                totals[name] = totals.get(name, 0.0) + value
        self.last |= other.last


def report_of(line: Mapping[str, Any], steps: float, seconds: float) -> Report:
    """`steps` and `seconds`: since the previous line."""
    sums, weights, last = {}, {}, {}
    for name, value in flat(line):
        last[name] = value
        as_float = number(value)
        if as_float is not None:
            summed = name.startswith(SUMMED) and name not in NOT_SUMMED
            sums[name] = as_float if summed else as_float * seconds
            weights[name] = seconds
    return Report(seconds, steps, sums, weights, last)


@dataclass
class Pauses:
    """The time of saving and evaluating since the start of the run. They are rare: a minute would be too short."""

    seconds: float = 0.0
    """Of training, with the pauses."""
    steps: float = 0.0
    durations: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PAUSES, 0.0))
    reports: int = 0
    """In which they took a noticeable share."""

    def add(self, line: Mapping[str, Any], steps: float, seconds: float) -> bool:
        """Add a line; return whether pauses took a noticeable share of it."""
        took = {name: min(max(number(line.get(name)) or 0.0, 0.0) * steps, seconds) for name in PAUSES}
        self.seconds += seconds
        self.steps += steps
        for name, time in took.items():
            self.durations[name] += time
        paused = sum(took.values()) > MAX_PAUSED * seconds
        self.reports += paused
        return paused

    def share(self, name: str) -> float:
        """Share of the time; 0 if there are too few reports."""
        enough = self.reports >= MIN_REPORTS and self.seconds >= MIN_S
        return self.durations[name] / self.seconds if enough else 0.0

    @property
    def step_s(self) -> float:
        """A step without pauses."""
        return max(self.seconds - sum(self.durations.values()), 0.0) / max(self.steps, 1e-9)


class Reports:
    """The reports that count: those of the last minute or so of training."""

    def __init__(self, global_batch: int | None):
        self.global_batch = global_batch
        self.step: float | None = None
        self.time: float | None = None
        self.evaluated = False  # since the last report
        self.recent: deque[Report] = deque()
        self.pauses = Pauses()

    def add(self, line: Mapping[str, Any]) -> float:
        """Add a line; return the seconds that it covers."""
        step, rate, time = (number(line.get(name)) for name in ("step", RATE, "time"))
        if step is None:
            return 0.0
        if rate is None or rate <= 0:
            self.evaluated = True  # its time is in the next report
            return 0.0
        before, clock, evaluated = self.step, self.time, self.evaluated
        self.step, self.time, self.evaluated = step, time, False
        if before is None or step <= before:  # the first one after a start
            return 0.0
        seconds = self._seconds(line, step - before, rate, time, clock)
        if seconds is None:
            return 0.0
        if time is not None and clock is not None and time - clock > 1.5 * seconds + 2:
            return 0.0  # the run was stopped in between
        if not self.pauses.add(line, step - before, seconds) and not evaluated:
            self._keep(report_of(line, step - before, seconds))
        return seconds

    def _seconds(
        self, line: Mapping[str, Any], steps: float, rate: float, time: float | None, before: float | None
    ) -> float | None:
        each = number(line.get("step_s"))
        if each is not None and each > 0:
            return steps * each
        if self.global_batch:
            return steps * self.global_batch / rate
        return time - before if time is not None and before is not None and time > before else None

    def _keep(self, report: Report) -> None:
        if self.recent and self.recent[-1].seconds < MERGED_S:
            self.recent[-1].add(report)
        else:
            self.recent.append(report)
        while len(self.recent) > MIN_REPORTS and self.seconds - self.recent[0].seconds > WINDOW_S:
            self.recent.popleft()

    @property
    def seconds(self) -> float:
        return sum(report.seconds for report in self.recent)

    @property
    def enough(self) -> bool:
        """Whether there are enough of ordinary steps, or hardly any because of the pauses between them."""
        usual = len(self.recent) >= MIN_REPORTS and self.seconds >= MIN_S
        return usual or max(map(self.pauses.share, PAUSES)) >= ALARM


@dataclass
class Figures:
    """The input of the rules."""

    seconds: float
    steps: float
    values: dict[str, float] = field(default_factory=dict)
    """Means over the time; sums for `loader.`."""
    last: dict[str, Any] = field(default_factory=dict)
    rising: dict[str, float] = field(default_factory=dict)
    """How much values that only grow have grown."""
    slow_ranks: dict[int, float] = field(default_factory=dict)
    """Rank -> share of the time in which it was the slowest."""
    pauses: Pauses = field(default_factory=Pauses)
    config: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)

    def get(self, name: str) -> float | None:
        return self.values.get(name)

    def of(self, name: str, default: float = 0.0) -> float:
        return self.values.get(name, default)

    def setting(self, name: str) -> Any:
        """A setting of the run, such as dataset.cache.tier."""
        setting: Any = self.config
        for part in name.split("."):
            setting = mapping(setting).get(part)
        return setting

    @property
    def step_s(self) -> float:
        return self.seconds / max(self.steps, 1e-9)

    def share(self, name: str) -> float | None:
        """A time of a step, as a share of the step."""
        seconds = self.get(name)
        return None if seconds is None else min(max(seconds / max(self.step_s, 1e-9), 0.0), 1.0)

    @property
    def on_gpu(self) -> bool:
        device = mapping(self.record.get("machine")).get("device")
        if isinstance(device, str) and device:
            return not device.startswith("CPU")
        return "gpu_busy" in self.values

    @property
    def processes(self) -> int:
        return int(number(mapping(self.record.get("machine")).get("processes")) or 1)

    @property
    def threads(self) -> float:
        """Threads that load; without any, the training threads do it."""
        return max(self.of("loader.threads"), float(self.processes), 1.0)


def figures_of(
    reports: Reports, config: Mapping[str, Any] | None = None, record: Mapping[str, Any] | None = None
) -> Figures:
    recent = list(reports.recent)
    total = Report(0.0, 0.0, {}, {}, {})
    slow: dict[int, float] = {}
    for report in recent:
        total.add(report)
        rank = number(report.last.get("slowest.rank"))
        if rank is not None:
            slow[int(rank)] = slow.get(int(rank), 0.0) + report.seconds
    values = {
        name: value if name.startswith(SUMMED) and name not in NOT_SUMMED else value / total.weights[name]
        for name, value in total.sums.items()
        if total.weights.get(name, 0) > 0
    }
    retries = [count for report in recent if (count := number(report.last.get("memory.retries"))) is not None]
    return Figures(
        total.seconds,
        total.steps,
        values,
        total.last,
        {"memory.retries": max(retries) - min(retries)} if retries else {},
        {rank: seconds / max(total.seconds, 1e-9) for rank, seconds in slow.items()},
        reports.pauses,
        config or {},
        record or {},
    )
