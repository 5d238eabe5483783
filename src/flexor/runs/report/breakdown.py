"""Where the time of a step goes: what the run measured of it, and the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flexor.runs.series import Series, thinned
from flexor.runs.state import RATE, WAIT, step_seconds

# Parts of a step that a run may report: seconds of a step (NAME_s) or a share of it (NAME)
PARTS = {
    "copy": "copying to the GPU",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "communication": "communication",
    "checkpoint": "saving checkpoints",
    "evaluation": "evaluating",
}


def breakdown(series: Mapping[str, Series], batch: int | None, most: int) -> dict[str, Any] | None:
    """{"x": steps, "parts": [{"name", "y": milliseconds per step}]}, whose sum is the step; None if it is unknown."""
    times = step_seconds(series.get(RATE), batch)
    if not times:
        return None
    step_times = Series("step", [step for step, _, _ in times], [each for _, _, each in times])
    x, seconds = thinned(step_times, most)
    parts = {"waiting for data": _share(series.get(WAIT), x, seconds)}
    for name, title in PARTS.items():
        if f"{name}_s" in series:
            parts[title] = _at(series[f"{name}_s"], x)
        elif name in series:
            parts[title] = _share(series[name], x, seconds)
    if len(parts) == 1 and "gpu_busy" in series:
        parts["GPU busy"] = _share(series["gpu_busy"], x, seconds)
    measured = _fit_in(parts, seconds)
    rest = "GPU idle for other reasons" if "GPU busy" in parts else "computing and the rest"
    if "forward_s" in series and "backward_s" in series:
        rest = "the rest"
    parts[rest] = [max(total - part, 0.0) for total, part in zip(seconds, measured)]
    milliseconds = {name: [round(1e3 * value, 6) for value in values] for name, values in parts.items()}
    return {
        "x": [int(step) for step in x],
        "parts": [{"name": name, "y": values} for name, values in milliseconds.items() if any(values)],
    }


def _fit_in(parts: dict[str, list[float]], seconds: list[float]) -> list[float]:
    """Shrink parts that add up to more than the step; return their sums.

    Each part is that of the rank with the largest one: while one rank computes, another waits for it. So it is
    communication, the time of waiting, that counts twice.
    """
    waiting = PARTS["communication"]
    for index, total in enumerate(seconds):
        measured = sum(values[index] for values in parts.values())
        if measured > total and waiting in parts:
            excess = min(parts[waiting][index], measured - total)
            parts[waiting][index] -= excess
            measured -= excess
        if measured > total:
            for values in parts.values():
                values[index] *= total / measured
    return [sum(values) for values in zip(*parts.values())]


def _at(series: Series | None, x: list[float]) -> list[float]:
    """Values at these steps; 0 where nothing was reported."""
    values = dict(zip(series.x, series.y)) if series else {}
    return [value if math.isfinite(value := values.get(step, 0.0)) else 0.0 for step in x]


def _share(series: Series | None, x: list[float], seconds: list[float]) -> list[float]:
    return [share * each for share, each in zip(_at(series, x), seconds)]
