"""Runs as one HTML page: curves, where the time goes, plan and reality, settings, checkpoints, images and videos."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flexor.core.console import Progress
from flexor.core.errors import ConfigError
from flexor.core.run_files import METRICS
from flexor.core.text import one_line
from flexor.core.version import VERSION
from flexor.pages.page import as_json, check_writable, page, write_page
from flexor.runs.diagnosis.figures import mapping
from flexor.runs.diagnosis.rules import diagnose_lines
from flexor.runs.find import find_runs, short_names
from flexor.runs.jsonl import GrowingLines
from flexor.runs.reader import RunReader
from flexor.runs.report.breakdown import breakdown
from flexor.runs.report.media import embed, images_of, videos_of
from flexor.runs.report.settings import differing, flat_settings
from flexor.runs.series import STEP, Series, thinned
from flexor.runs.state import RATE, STATUS, RunState, global_batch, is_alarm, step_seconds
from flexor.runs.text import duration_text, figure, title_of, value_text

STYLES = (("flexor.runs.report", "report.css"),)
SCRIPTS = (("flexor.runs.report", "report.js"),)
PAGE_BYTES = 20_000_000
SMALLEST_PAGE = 1_000_000
POINT_BYTES = 20  # of a value with its step, about
MOST_POINTS, FEWEST_POINTS = 5000, 50  # of a series
MOST_RUNS = 32
DIGITS = 9
SPEED = ("samples_per_s", "data_wait", "gpu_busy")
FIRST = ("loss", "held_out_loss", "eval_success_rate")
SPREAD = ("mean", "lowest", "highest")


def write_report(
    named: Sequence[Path], output: Path | None, *, limit: int = PAGE_BYTES, progress: Progress | None = None
) -> dict[str, Any]:
    """Write the page in about `limit` bytes, at most; returns what it shows."""
    if limit < SMALLEST_PAGE:
        raise ConfigError(f"a page needs at least {SMALLEST_PAGE / 1e6:g} MB: choose a larger --max-mb.")
    folders = _folders(named)
    output = output or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    check_writable(output)
    readers = []
    for number, (folder, name) in enumerate(zip(folders, short_names(folders))):
        readers.append(RunReader(folder, name))
        readers[-1].poll()
        if progress:
            progress(number + 1, len(folders))
    data = report_data(readers, limit)
    videos = any(file["data"] for run in data["runs"] for file in run["videos"])
    write_page(output, page(data["title"], data=data, styles=STYLES, scripts=SCRIPTS, videos=videos))
    media = [file for run in data["runs"] for kind in ("videos", "images") for file in run[kind]]
    return {
        "file": str(output),
        "bytes": output.stat().st_size,
        "runs": [{"name": run["name"], "status": run["status"], "step": run["step"]} for run in data["runs"]],
        "series": len({name for run in data["runs"] for name in run["series"]}),
        "embedded": sum(file["data"] is not None for file in media),
        "not_embedded": [file["name"] for file in media if file["data"] is None],
    }


def render(result: dict[str, Any]) -> str:
    runs = ", ".join(f"{one_line(run['name'])} (step {run['step']:,})" for run in result["runs"])
    text = f"{result['file']}: {result['bytes'] / 1e6:.1f} MB, {result['series']} curves of {runs}"
    left_out = len(result["not_embedded"])
    return f"{text}; {left_out} videos or images did not fit (--max-mb)" if left_out else text


def _folders(named: Sequence[Path]) -> list[Path]:
    folders = find_runs(named)
    if not folders:
        where = ", ".join(map(str, named))
        raise ConfigError(f"there is no run in {where}: name a run's folder, which has a {METRICS}.")
    if len(folders) > MOST_RUNS:
        raise ConfigError(f"{len(folders)} runs are too many for one page: name at most {MOST_RUNS} of them.")
    return folders


def report_data(readers: Sequence[RunReader], limit: int = PAGE_BYTES) -> dict[str, Any]:
    """Everything that the page's script draws, as plain JSON values."""
    points = _points(readers, limit)
    settings = [flat_settings(reader.config) for reader in readers]
    names = [one_line(reader.name) for reader in readers]
    data: dict[str, Any] = {
        "title": names[0] if len(names) == 1 else f"{len(names)} runs: {', '.join(names)}"[:200],
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "version": VERSION,
        "groups": _groups(readers),
        "differences": differing(settings),
        "settings": settings[0] if len(settings) == 1 else {},
        "runs": [_run(reader, points) for reader in readers],
    }
    folders = [reader.folder for reader in readers]
    images = [images_of(reader.folder) for reader in readers]
    videos = [videos_of(reader.folder, reader.videos) for reader in readers]
    room = limit - len(as_json(data)) - 200_000  # for the scripts, and names
    embed(folders, videos, embed(folders, images, room // 2) + room - room // 2)
    for kind, media in (("images", images), ("videos", videos)):
        for run, files in zip(data["runs"], media):
            run[kind] = [asdict(file) for file in files]
    return data


def _points(readers: Sequence[RunReader], limit: int) -> int:
    """How many points a series may have, so that all of them take at most half of the page."""
    count = sum(len(reader.series) for reader in readers)
    return max(min(limit // 2 // POINT_BYTES // max(count, 1), MOST_POINTS), FEWEST_POINTS)


def _groups(readers: Sequence[RunReader]) -> list[dict[str, Any]]:
    """Which curves belong together: what the policy learns, how fast, and a group for each other file of the run."""
    groups: dict[tuple[str, str], dict[str, list[str]]] = {("Learning", STEP): {}, ("Speed", STEP): {}}
    for reader in readers:
        for name, series in reader.series.items():
            plots = groups.setdefault((_group(name, series.axis), series.axis), {})
            names = plots.setdefault(family(name), [])
            if name not in names:
                names.append(name)
    return [
        {
            "title": title,
            "axis": axis,
            "plots": [
                {"title": title_of(base), "names": names, "labels": [member(name) for name in names]}
                for base, names in sorted(plots.items(), key=lambda item: _place(item[0]))
            ],
        }
        for (title, axis), plots in groups.items()
        if plots
    ]


def _group(name: str, axis: str) -> str:
    group, dot, _ = name.partition(".")
    if dot:
        return group.replace("_", " ") + (", over time" if axis != STEP else "")
    return "Speed" if name in SPEED or name.endswith(("_s", "_bytes", "_share")) else "Learning"


def _place(name: str) -> int:
    return FIRST.index(name) if name in FIRST else len(FIRST)


def family(name: str) -> str:
    """`system.gpus.0.util` and `system.gpus.1.util` are drawn in one plot: `system.gpus.util`."""
    return ".".join(part for part in name.split(".") if not part.isdigit() and part not in SPREAD)


def member(name: str) -> str:
    return " ".join(part for part in name.split(".") if part.isdigit() or part in SPREAD)


def _run(reader: RunReader, points: int) -> dict[str, Any]:
    state = reader.state()
    times = step_seconds(reader.series.get(RATE), global_batch(reader.config))
    elapsed, total = Series(STEP), 0.0
    for step, steps, each in times:
        total += steps * each
        elapsed.add(step, total)
    return {
        "name": one_line(reader.name),
        "folder": str(reader.folder.resolve()),
        "status": STATUS[state.status],
        "step": state.step,
        "facts": facts_of(reader, state),
        "verdict": state.verdict,
        "health": state.health_json(),
        "alarm": bool(state.verdict and is_alarm(state.verdict)),
        "diagnosis": diagnosis_of(reader),
        "damaged": state.damaged_lines,
        "plan": [plan_row(row.name, row.planned, row.actual) for row in state.plan],
        "checkpoints": [asdict(checkpoint) for checkpoint in state.checkpoints],
        "series": {name: points_of(series, points) for name, series in reader.series.items()},
        "elapsed": points_of(elapsed, points),
        "breakdown": breakdown(reader.series, global_batch(reader.config), points),
    }


def diagnosis_of(reader: RunReader) -> list[dict[str, Any]]:
    """The verdict and what else was found, with figures: of the run's last reports."""
    lines = GrowingLines(reader.folder / METRICS).read()[1]
    findings = diagnose_lines(lines, reader.config, reader.record)[0].findings
    return [
        {
            "verdict": finding.name,
            "evidence": one_line(finding.evidence),
            "figures": [[name, one_line(value)] for name, value in finding.figures],
            "changes": [one_line(fix.text) for fix in finding.fixes],
        }
        for finding in findings
    ]


def points_of(series: Series, most: int) -> dict[str, Any]:
    x, y = thinned(series, most)
    return {"x": [_short(value) for value in x], "y": [_short(value) for value in y], "count": len(series.x)}


def _short(value: float) -> float | int | None:
    """With as many digits as a reader could need; a whole number without a point."""
    if not math.isfinite(value):
        return None
    if value == round(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{DIGITS}g}") if abs(value) < 1e8 else value


def plan_row(name: str, planned: float | None, actual: float | None) -> list[str]:
    both = planned and actual is not None
    return [
        title_of(name),
        "" if planned is None else value_text(name, planned),
        "not measured" if actual is None else value_text(name, actual),
        f"{100 * (actual / planned - 1):+.0f} %" if both and actual is not None and planned else "",
    ]


def facts_of(reader: RunReader, state: RunState) -> list[tuple[str, str]]:
    """The run in a few lines. What is not known is left out."""
    series, config, record = reader.series, reader.config, reader.record
    machine, data = (mapping(record.get(name)) for name in ("machine", "dataset"))
    rates = [rate for _, rate in series[RATE].finite()] if RATE in series else []
    facts = {
        "status": STATUS[state.status],
        "step": f"{state.step:,}" + (f" of {state.steps:,}" if state.steps else ""),
        "policy": mapping(config.get("policy")).get("type"),
        "dataset": data.get("name"),
        "episodes": data.get("episodes"),
        "device": machine.get("device"),
        "processes": machine.get("processes"),
        "precision": machine.get("precision"),
        "samples of a step": config.get("global_batch_size"),
        "time": duration_text(state.elapsed_s) if state.elapsed_s is not None else None,
        "time left": duration_text(state.left_s) if state.left_s is not None else None,
        "samples/s, median": figure(statistics.median(rates)) if rates else None,
        **_best(series),
    }
    return [(name, one_line(str(value))) for name, value in facts.items() if value is not None]


def _best(series: Mapping[str, Series]) -> dict[str, str]:
    """The last loss, and the best of what is measured now and then."""
    figures = {}
    for name, best in (("loss", None), ("held_out_loss", min), ("eval_success_rate", max)):
        points = series[name].finite() if name in series else []
        if points and best is None:
            figures[title_of(name)] = value_text(name, points[-1][1])
        elif points and best is not None:
            step, value = best(points, key=lambda point: point[1])
            figures[f"best {title_of(name)}"] = f"{value_text(name, value)} at step {step:,.0f}"
    return figures
