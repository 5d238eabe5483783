"""The runs of some folders for the application: a list at once, then curves and details of those that are selected."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from flexor.core.errors import ConfigError
from flexor.core.output_paths import replacing
from flexor.core.paths import inside
from flexor.core.run_files import LOG, METRICS, NOTES
from flexor.core.text import one_line
from flexor.runs.diagnosis.figures import mapping
from flexor.runs.find import SIGNS, find_runs, short_names
from flexor.runs.reader import RunReader
from flexor.runs.report.breakdown import breakdown
from flexor.runs.report.media import videos_of
from flexor.runs.report.page import diagnosis_of, facts_of, plan_row, points_of
from flexor.runs.report.settings import differing, flat_settings
from flexor.runs.series import STEP, Series
from flexor.runs.signals import SIGNALS, folded
from flexor.runs.state import STATUS, RunState, global_batch, is_alarm
from flexor.runs.text import figure
from flexor.ui.replies import FileReply, NotFound

SEARCHED_EVERY_S = 3.0
READ_S = 0.15  # of a request for the list, for runs that were not read yet
LIVE_EVERY_S, ENDED_EVERY_S = 1.0, 10.0  # how often a run is looked at again
POINTS = 500  # of a curve: more than a plot has pixels to show
LOG_BYTES = 200_000
LONGEST_NOTES = 100_000
MOST_COMPARED = 64


@dataclass
class _Entry:
    reader: RunReader
    polled: float = -1e9
    row: dict[str, Any] | None = None
    state: RunState | None = None
    stamp: tuple[float, ...] = ()
    """When its files were written, as far as they were read."""


class RunShelf:
    """Runs in folders, read again when somebody looks."""

    def __init__(self, folders: Sequence[Path]):
        self.folders = list(folders)
        self._entries: dict[str, _Entry] = {}
        self._searched = -1e9
        self._lock = Lock()

    def rows(self) -> list[dict[str, Any]]:
        """One for each run; those not read yet have only their name. Reading goes on at the next request."""
        with self._lock:
            self._search()
            end = time.monotonic() + READ_S
            for entry in sorted(self._entries.values(), key=_changed_last):
                unread = entry.row is None
                if time.monotonic() < end and (unread or self._is_due(entry)):
                    self._read(entry)
            return [
                {"id": run_id, "name": one_line(entry.reader.name), **(entry.row or {"loaded": False})}
                for run_id, entry in self._entries.items()
            ]

    def curves(self, run_ids: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
        """Points of some series of some runs: {id: {name: {x, y, count}}}."""
        with self._lock:
            curves = {}
            for run_id in run_ids[:MOST_COMPARED]:
                reader = self._fresh(run_id).reader
                series = over_steps(reader, names)
                curves[run_id] = {name: points_of(curve, POINTS) for name, curve in series.items()}
            return curves

    def plots(self, run_ids: Sequence[str]) -> dict[str, Any]:
        """What can be drawn of these runs: the signals that matter, and the rest in groups."""
        with self._lock:
            readers = [self._fresh(run_id).reader for run_id in run_ids[:MOST_COMPARED]]
            names = dict.fromkeys(name for reader in readers for name in reader.series)
        signals = [signal.to_json() for signal in SIGNALS if {*signal.names} & names.keys()]
        return {"signals": signals, "folded": folded(names)}

    def detail(self, run_id: str) -> dict[str, Any]:
        """Everything about one run but its curves."""
        with self._lock:
            entry = self._fresh(run_id)
            reader, state = entry.reader, entry.state
            assert state is not None
            return {
                **(entry.row or {}),
                "id": run_id,
                "name": one_line(reader.name),
                "folder": str(reader.folder.resolve()),
                "facts": facts_of(reader, state),
                "verdict": state.verdict,
                "health": state.health_json(),
                "diagnosis": [
                    finding | {"alarm": is_alarm(finding["verdict"])} for finding in diagnosis_of(reader)
                ],
                "damaged": state.damaged_lines,
                "plan": [plan_row(row.name, row.planned, row.actual) for row in state.plan],
                "checkpoints": [asdict(checkpoint) for checkpoint in state.checkpoints],
                "settings": flat_settings(reader.config),
                "breakdown": breakdown(reader.series, global_batch(reader.config), POINTS),
                "videos": _videos(reader),
                "notes": self._notes(reader.folder),
            }

    def videos(self, run_ids: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        """The videos of some runs, the newest first."""
        with self._lock:
            return {run_id: _videos(self._fresh(run_id).reader) for run_id in run_ids[:MOST_COMPARED]}

    def differences(self, run_ids: Sequence[str]) -> list[tuple[str, list[str | None]]]:
        """Settings in which runs differ."""
        with self._lock:
            return differing([flat_settings(self._fresh(run_id).reader.config) for run_id in run_ids])

    def log_text(self, run_id: str) -> str:
        """The end of a run's log."""
        path = self._entry(run_id).reader.folder / LOG
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(size - LOG_BYTES, 0))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return text if size <= LOG_BYTES else text.partition("\n")[2]

    def video(self, run_id: str, name: str) -> FileReply:
        reader = self._entry(run_id).reader
        if name not in {file.name for file in videos_of(reader.folder, reader.videos)}:
            raise NotFound(f"This run has no video {name!r}.")
        return FileReply(inside(reader.folder, name), "video/mp4")

    def write_notes(self, run_id: str, text: str) -> None:
        """Keep what a person wrote in the run's folder."""
        if len(text) > LONGEST_NOTES:
            raise ConfigError(f"Notes have at most {LONGEST_NOTES:,} characters.")
        path = inside(self._entry(run_id).reader.folder, NOTES)
        with replacing(path) as aside:
            aside.write_text(text, encoding="utf-8", errors="replace")

    def configs(self) -> list[dict[str, Any]]:
        """The settings of the runs that were read."""
        with self._lock:
            return [entry.reader.config for entry in self._entries.values() if entry.row]

    def named_configs(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """The name and the settings of the runs that were read, the newest first."""
        with self._lock:
            entries = [(run_id, entry) for run_id, entry in self._entries.items() if entry.row]
            entries.sort(key=lambda item: -_mtime(item[1].reader.folder))
            return {run_id: (one_line(e.reader.name), e.reader.config) for run_id, e in entries}

    def _notes(self, folder: Path) -> str:
        try:
            return inside(folder, NOTES).read_text(encoding="utf-8", errors="replace")[:LONGEST_NOTES]
        except OSError:
            return ""

    def _search(self) -> None:
        if time.monotonic() - self._searched < SEARCHED_EVERY_S:
            return
        self._searched = time.monotonic()
        folders = find_runs([folder for folder in self.folders if folder.exists()])
        entries = {}
        for folder, name in zip(folders, short_names(folders)):
            run_id = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
            entries[run_id] = self._entries.get(run_id) or _Entry(RunReader(folder))
            entries[run_id].reader.name = name
        self._entries = entries

    def _is_due(self, entry: _Entry) -> bool:
        live = entry.row is not None and entry.row["live"]
        return time.monotonic() - entry.polled > (LIVE_EVERY_S if live else ENDED_EVERY_S)

    def _entry(self, run_id: str) -> _Entry:
        with_entries = self._entries.get(run_id)
        if with_entries is None:
            raise NotFound("This run no longer exists.")
        return with_entries

    def _fresh(self, run_id: str) -> _Entry:
        entry = self._entry(run_id)
        if entry.row is None or self._is_due(entry):
            self._read(entry)
        return entry

    def _read(self, entry: _Entry) -> None:
        """Read what is new. A run that has ended and whose files are as they were costs nothing."""
        entry.polled = time.monotonic()
        before, entry.stamp = entry.stamp, _stamp(entry.reader.folder)
        if entry.row is not None and not entry.row["live"] and entry.stamp == before:
            return
        entry.reader.poll()
        entry.state = entry.reader.state()
        entry.row = _row(entry.reader, entry.state)


def over_steps(reader: RunReader, names: Sequence[str]) -> dict[str, Series]:
    """Series by name. Samples of the machine are over time: they get the step that the run was at."""
    all_series, curves = reader.series, {}
    clock = sorted(reader.clock.items(), key=lambda item: item[1])
    steps, times = zip(*clock) if clock else ((), ())
    for name in names:
        curve = all_series.get(name)
        if curve is not None and curve.axis != STEP:
            x = np.interp(curve.x, times, steps).tolist() if clock else []
            curve = Series(STEP, x, curve.y if clock else [])
        if curve is not None and curve.x:
            curves[name] = curve
    return curves


def _changed_last(entry: _Entry) -> tuple[bool, float]:
    """Runs that were never read come first, the newest of them at the beginning; then those read longest ago."""
    if entry.row is not None:
        return True, entry.polled
    return False, -_mtime(entry.reader.folder)


def _stamp(folder: Path) -> tuple[float, ...]:
    times = []
    for name in SIGNS:
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            times.append(0.0)
    return tuple(times)


def _mtime(folder: Path) -> float:
    for path in (folder / METRICS, folder):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0


def _row(reader: RunReader, state: RunState) -> dict[str, Any]:
    """A run in the list: where it stands, and its best results."""
    values, config = state.values, reader.config
    lowest = _extreme(reader, "held_out_loss", min)
    best = _extreme(reader, "eval_success_rate", max)
    return {
        "loaded": True,
        "live": state.status in ("running", "starting", "silent"),
        "status": STATUS[state.status],
        "step": state.step,
        "steps": state.steps,
        "policy": mapping(config.get("policy")).get("type"),
        "dataset": mapping(reader.record.get("dataset")).get("name"),
        "device": mapping(reader.record.get("machine")).get("device"),
        "batch": global_batch(config),
        "lr": mapping(config.get("optimizer")).get("lr"),
        "loss": values.get("loss"),
        "held_out_loss": lowest[1] if lowest else None,
        "success": _success(reader, best[0]) if best else _recent_success(values, state.step),
        "samples_per_s": values.get("samples_per_s"),
        "left_s": state.left_s,
        "elapsed_s": state.elapsed_s,
        "updated": _mtime(reader.folder),
        "verdict": (state.verdict or "").partition(":")[0] or None,
        "video_count": len(reader.videos),
        "alarm": bool(state.verdict and is_alarm(state.verdict)),
        "health": [finding.name for finding in state.health],
    }


def _videos(reader: RunReader) -> list[dict[str, Any]]:
    return [{"name": file.name, "step": file.step} for file in videos_of(reader.folder, reader.videos)]


def _recent_success(values: Mapping[str, Any], step: int) -> dict[str, float] | None:
    """Of a run that learns while it acts: in its last episodes."""
    rate = values.get("success_rate")
    return {"step": step, "rate": rate} if isinstance(rate, int | float) and math.isfinite(rate) else None


def _extreme(reader: RunReader, name: str, best: Any) -> tuple[float, float] | None:
    points = reader.series[name].finite() if name in reader.series else []
    return best(points, key=lambda point: point[1]) if points else None


def _success(reader: RunReader, step: float) -> dict[str, float]:
    """The success rate at a step, with its interval."""
    result = {"step": step}
    for key, name in (("rate", "rate"), ("low", "low"), ("high", "high")):
        curve = reader.series.get(f"eval_success_{name}")
        value = dict(zip(curve.x, curve.y)).get(step) if curve else None
        if value is not None:
            result[key] = float(figure(value))
    return result
