"""Where a run stands: its status, its newest figures, the time left, and how it compares with its plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flexor.core.findings import Finding
from flexor.runs.health import to_json
from flexor.runs.series import STEP, Series

RATE = "samples_per_s"
WAIT = "data_wait"
LEFT = "left_s"
RECENT = 20  # reports that the time left is computed from
SILENT_S = 60.0
SILENT_REPORTS = 5  # times the usual time between two of them

GPU_BOUND, CPU_BOUND = "GPU-bound", "compute-bound (CPU)"  # verdicts of runs that nothing holds back
ENVIRONMENT_BOUND, UPDATE_BOUND = "environment-bound", "update-bound"  # of runs that learn while they act

STATUS = {name: name for name in ("starting", "running", "finished", "stopped")}
STATUS |= {"empty": "no run yet", "silent": "no news"}


@dataclass
class PlannedValue:
    """A figure of the plan, and its measurement; None if it is unknown (yet)."""

    name: str
    planned: float | None
    actual: float | None


@dataclass
class SavedCheckpoint:
    step: int
    folder: str
    bytes: int
    saved: float  # seconds since 1970


@dataclass
class RunState:
    """Everything that `flexor watch --json` prints about a run. Times are in seconds."""

    name: str
    folder: str
    status: str = "empty"
    step: int = 0
    steps: int | None = None
    values: dict[str, float | None] = field(default_factory=dict)
    """The newest value of every series; None if it is not finite."""
    step_s: float | None = None
    elapsed_s: float | None = None
    left_s: float | None = None
    reported_s_ago: float | None = None
    plan: list[PlannedValue] = field(default_factory=list)
    checkpoints: list[SavedCheckpoint] = field(default_factory=list)
    videos: list[str] = field(default_factory=list)
    verdict: str | None = None
    health: list[Finding] = field(default_factory=list)
    """Findings about its learning."""
    log_line: str | None = None
    damaged_lines: int = 0

    def health_json(self) -> list[dict[str, Any]]:
        return [{**to_json(finding), "step": finding.step} for finding in self.health]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "health": self.health_json()}


def status_of(
    step: int,
    steps: int | None,
    alive: bool | None,
    silent_s: float | None,
    interval_s: float | None,
    has_begun: bool,
) -> str:
    """`alive`: whether the run's process is; None if that is unknown, and the time since the last report decides.

    `silent_s`: seconds since the last report; `interval_s`: the usual time between two reports.
    """
    if steps is not None and step >= steps > 0:
        return "finished"
    if alive:
        return "running" if silent_s is not None else "starting"
    if alive is not None:
        return "stopped" if has_begun else "empty"
    if silent_s is None:
        return "silent" if has_begun else "empty"
    return "silent" if silent_s > max(SILENT_S, SILENT_REPORTS * (interval_s or 0)) else "running"


def global_batch(config: Mapping[str, Any]) -> int | None:
    """Samples of a step. A run writes it into its settings when it begins."""
    size = config.get("global_batch_size")
    return size if isinstance(size, int) and size > 0 else None


def step_seconds(rates: Series | None, batch: int | None) -> list[tuple[float, int, float]]:
    """(step, steps since the previous report, seconds per step) for every report of a rate."""
    if rates is None or batch is None or rates.axis != STEP:
        return []
    times, previous = [], 0.0
    for step, rate in zip(rates.x, rates.y):
        if math.isfinite(rate) and rate > 0:
            times.append((step, int(step - previous), batch / rate))
        previous = step
    return times


def recent_step_s(times: list[tuple[float, int, float]]) -> float | None:
    last = times[-RECENT:]
    count = sum(steps for _, steps, _ in last)
    return sum(steps * each for _, steps, each in last) / count if count else None


def elapsed_s(times: list[tuple[float, int, float]], clock: Mapping[float, float]) -> float | None:
    """From the beginning of the first step; without pauses between a stop and a resume, unless lines say the time."""
    if not times:
        return None
    if len(clock) == len(times) > 1:  # every report says when it was written
        steps = sorted(clock)
        return clock[steps[-1]] - clock[steps[0]] + times[0][1] * times[0][2]
    return sum(steps * each for _, steps, each in times)


def plan_rows(
    plan: object, step_s: float | None, wait: float | None, run_s: float | None = None
) -> list[PlannedValue]:
    """All figures of the plan. A record has pairs, `planned_NAME` and `NAME`; the second may come later, or never."""
    if not isinstance(plan, dict):
        return []
    rows = []
    for key, planned in plan.items():
        if not key.startswith("planned_"):
            continue
        name = key.removeprefix("planned_")
        actual = plan.get(name)
        if name == "step_s" and actual is None and step_s is not None:
            actual = step_s * (1 - (wait or 0.0))  # a plan counts only the step
        if name == "run_s" and actual is None:
            actual = run_s
        rows.append(PlannedValue(name, _number(planned), _number(actual)))
    return rows


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def verdict_text(diagnosis: object) -> str | None:
    """A recorded diagnosis as text; it may be a text, an object with a verdict and its evidence, or a list of them."""
    if isinstance(diagnosis, str):
        return diagnosis or None
    if isinstance(diagnosis, list):
        return "; ".join(text for item in diagnosis if (text := verdict_text(item))) or None
    if not isinstance(diagnosis, dict) or "verdict" not in diagnosis:
        return None
    parts = [str(diagnosis[name]) for name in ("verdict", "evidence", "change") if diagnosis.get(name)]
    return ": ".join(parts[:2]) + "".join(f". {part}" for part in parts[2:])


def is_alarm(verdict: str) -> bool:
    """Whether a verdict's text says that something is wrong."""
    return not verdict.startswith((GPU_BOUND, CPU_BOUND, ENVIRONMENT_BOUND, UPDATE_BOUND))


def relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()
