"""Reads a run's folder repeatedly while it trains: each time only what is new."""

from __future__ import annotations

import contextlib
import math
import time
from collections import ChainMap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flexor.core.foreign_files import MALFORMED, parse_json, parse_yaml, read_json, read_text
from flexor.core.run_files import CHECKPOINTS, MANIFEST, METRICS, RUN_CONFIG, RUN_RECORD, VIDEOS
from flexor.runs.find import is_run
from flexor.runs.health import from_record
from flexor.runs.jsonl import GrowingLines
from flexor.runs.process import is_alive
from flexor.runs.series import STEP, TIME, AllSeries, Series
from flexor.runs.state import (
    LEFT,
    RATE,
    WAIT,
    RunState,
    SavedCheckpoint,
    elapsed_s,
    global_batch,
    plan_rows,
    recent_step_s,
    relative,
    status_of,
    step_seconds,
    verdict_text,
)

LOG_END = 8192  # bytes at the end of a log in which its last line is looked for
LISTED_EVERY_S = 3.0  # folders of checkpoints and videos are listed this often
VERDICT = "verdict"


class RunReader:
    """One run. `poll` reads what is new; afterwards `series`, `config`, `record` and `state()` are up to date."""

    def __init__(self, folder: Path, name: str | None = None):
        self.folder = folder
        self.name = name or folder.resolve().name
        self.config: dict[str, Any] = {}
        self.record: dict[str, Any] = {}
        self.checkpoints: list[SavedCheckpoint] = []
        self.videos: list[Path] = []
        self._files: dict[str, tuple[GrowingLines, AllSeries]] = {}
        self._read_at: dict[str, tuple[int, int]] = {}
        self._listed = -math.inf

    def poll(self) -> None:
        # The metrics come first, so that their names are taken by them. Any other file's series carry its name.
        names = {METRICS: ""} | {path.name: f"{path.stem}." for path in sorted(self.folder.glob("*.jsonl"))}
        names[METRICS] = ""
        for name, prefix in names.items():
            if name not in self._files:
                axis = STEP if name == METRICS else TIME
                self._files[name] = GrowingLines(self.folder / name), AllSeries(prefix, axis)
            lines, series = self._files[name]
            again, new = lines.read()
            if again:
                series.clear()
            for line in new:
                series.add(line)
        self._reread(RUN_CONFIG, self._take_config)
        self._reread(RUN_RECORD, self._take_record)
        if time.monotonic() - self._listed > LISTED_EVERY_S:
            self._listed = time.monotonic()
            self.checkpoints = _checkpoints(self.folder)
            self.videos = sorted((self.folder / VIDEOS).rglob("*.mp4"))

    @property
    def series(self) -> Mapping[str, Series]:
        """All series by name, those of the metrics first."""
        merged: dict[str, Series] = {}
        for _, file_series in self._files.values():
            merged |= file_series.series
        return merged

    @property
    def texts(self) -> Mapping[str, str]:
        return ChainMap(*(series.texts for _, series in self._files.values()))

    @property
    def clock(self) -> dict[float, float]:
        """step -> seconds since 1970, where the metrics say it."""
        return self._files[METRICS][1].times if METRICS in self._files else {}

    def state(self) -> RunState:
        series = self.series
        metrics = self._files.get(METRICS)
        written = metrics[0].written if metrics else None
        ago = max(time.time() - written, 0.0) if written and metrics and metrics[1].series else None
        step = self.step
        steps = self.config.get("steps") if isinstance(self.config.get("steps"), int) else None
        times = step_seconds(series.get(RATE), global_batch(self.config))
        each = recent_step_s(times)
        usual = each * max(times[-1][1], 1) if each and times else None
        alive = is_alive(self.folder)
        state = RunState(
            name=self.name,
            folder=str(self.folder),
            status=status_of(step, steps, alive, ago, usual, is_run(self.folder)),
            step=step,
            steps=steps,
            values={name: _finite(curve.last) for name, curve in series.items()},
            step_s=each,
            elapsed_s=elapsed_s(times, self.clock),
            reported_s_ago=ago,
            checkpoints=self.checkpoints,
            videos=[relative(path, self.folder) for path in self.videos],
            verdict=self._verdict(),
            health=from_record(self.record.get("health")),
            log_line=_last_log_line(self.folder),
            damaged_lines=sum(lines.damaged for lines, _ in self._files.values()),
        )
        left = series.get(LEFT)
        if state.status == "running" and left is not None and left.last > 0:  # not NaN
            state.left_s = max(left.last - (ago or 0.0), 0.0)
        elif steps and each and state.status == "running":  # a run that does not say it
            state.left_s = max((steps - step) * each - (ago or 0.0), 0.0)
        run_s = None  # of the whole run: what it has taken, and what is left
        if state.elapsed_s is not None and (state.left_s is not None or state.status == "finished"):
            run_s = state.elapsed_s + (state.left_s or 0.0)
        state.plan = plan_rows(self.record.get("plan"), each, state.values.get(WAIT), run_s)
        return state

    @property
    def step(self) -> int:
        """The newest step that was reported."""
        if METRICS not in self._files:
            return 0
        metrics = self._files[METRICS][1].series.values()
        return int(max((series.x[-1] for series in metrics if series.axis == STEP), default=0))

    def _verdict(self) -> str | None:
        recorded = verdict_text(self.record.get("diagnosis")) or verdict_text(self.record.get(VERDICT))
        parts = {name: self.texts.get(f"{VERDICT}.{name}") for name in (VERDICT, "evidence", "change")}
        reported = verdict_text(parts) if parts[VERDICT] else None
        return self.texts.get(VERDICT) or reported or recorded

    def _reread(self, name: str, take: Callable[[str], None]) -> None:
        """Read a small file if it has changed. One that is missing or half written keeps what was read before."""
        path = self.folder / name
        with contextlib.suppress(OSError, ValueError):
            status = path.stat()
            if self._read_at.get(name) != (status.st_mtime_ns, status.st_ino):
                take(read_text(path))
                self._read_at[name] = (status.st_mtime_ns, status.st_ino)

    def _take_config(self, text: str) -> None:
        config = parse_yaml(text)
        if isinstance(config, dict):
            self.config = config

    def _take_record(self, text: str) -> None:
        record = parse_json(text)
        if isinstance(record, dict):
            self.record = record


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """The complete ones, oldest first. Their manifests say how large they are."""
    checkpoints = []
    for path in (folder / CHECKPOINTS).glob("[0-9]*"):
        with contextlib.suppress(OSError, *MALFORMED):
            manifest = path / MANIFEST
            files = read_json(manifest)["files"]
            size = sum(int(file["size"]) for file in files.values())
            saved = manifest.stat().st_mtime
            checkpoints.append(SavedCheckpoint(int(path.name), relative(path, folder), size, saved))
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def _last_log_line(folder: Path) -> str | None:
    """Of the newest log: in the run's folder, or beside it, where a SLURM job writes it."""
    beside = folder.resolve().with_name(f"{folder.resolve().name}.slurm")
    with contextlib.suppress(OSError):
        logs = [*folder.glob("*.log"), *beside.glob("*.log")]
        newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
        if newest is None:
            return None
        with newest.open("rb") as file:
            file.seek(max(newest.stat().st_size - LOG_END, 0))
            lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), None)
    return None
