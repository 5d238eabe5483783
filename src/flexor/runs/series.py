"""The numbers in a run's lines as series, under the names in the lines."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

STEP = "step"
TIME = "time"  # seconds since 1970
IGNORED = ("span", "index")  # of a sample: how long it is, and what number a GPU has
MAX_LIST = 16  # a longer list (the cores of a large machine) becomes its mean, lowest and highest value
MAX_SERIES = 1000  # no run writes a file with more of them
LARGEST = 1e300  # JSON has integers that no float can hold


@dataclass
class Series:
    """Values over steps, or over time if the lines have no step. NaN: the run reported a value that is not finite."""

    axis: str
    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)

    def add(self, x: float, y: float) -> None:
        """A resumed run repeats steps: what it reported for them before is replaced."""
        if self.x and x <= self.x[-1]:
            keep = bisect_left(self.x, x)
            del self.x[keep:], self.y[keep:]
        self.x.append(x)
        self.y.append(y)

    @property
    def last(self) -> float:
        return self.y[-1]

    def finite(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in zip(self.x, self.y) if math.isfinite(y)]


class AllSeries:
    """The contents of one file: series of numbers, and the newest value of each text.

    `axis`: what its series are over, if its lines have both a step and a time. Samples have several lines per step.
    """

    def __init__(self, prefix: str = "", axis: str = STEP):
        self.prefix = prefix
        self.axis = axis
        self.clear()

    def clear(self) -> None:
        self.series: dict[str, Series] = {}
        self.texts: dict[str, str] = {}
        self.times: dict[float, float] = {}
        """step -> seconds since 1970, if the lines say both."""

    def add(self, line: dict[str, Any]) -> None:
        other = TIME if self.axis == STEP else STEP
        axis = self.axis if _is_number(line.get(self.axis)) else other
        x = line.get(axis)
        if not _is_number(x):
            return
        assert x is not None
        if axis == STEP and _is_number(line.get(TIME)):
            self.times[x] = line[TIME]
        for name, value in _flat({k: v for k, v in line.items() if k not in (STEP, TIME)}):
            if isinstance(value, str):
                self.texts[self.prefix + name] = value
            elif value is None or isinstance(value, int | float):
                finite = value is not None and -LARGEST < value < LARGEST
                self._of(name, axis).add(float(x), float(value) if finite else math.nan)  # type: ignore[arg-type]

    def _of(self, name: str, axis: str) -> Series:
        name = self.prefix + name
        if name not in self.series and len(self.series) >= MAX_SERIES:
            return Series(axis)
        series = self.series.setdefault(name, Series(axis))
        if series.axis != axis:  # the file changed its axis: the newer one counts
            series.axis, series.x, series.y = axis, [], []
        return series


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """The moving average over earlier values: `weight` for the past, the rest for the new value. 0 changes nothing.

    The first values are not pulled towards zero. Values that are not finite are left out of the average.
    """
    if not weight:
        return list(values)
    average, norm, result = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            average = weight * average + (1 - weight) * value
            norm = weight * norm + (1 - weight)
            result.append(average / norm)
        else:
            result.append(math.nan)
    return result


def thinned(series: Series, limit: int) -> tuple[list[float], list[float]]:
    """At most `limit` of the points, unchanged: the lowest and the highest of each stretch, and the ends."""
    count = len(series.x)
    if count <= limit:
        return series.x, series.y
    stretches = max((limit - 2) // 2, 1)
    positions = {0, count - 1}
    for number in range(stretches):
        begin, end = number * count // stretches, (number + 1) * count // stretches
        finite = [i for i in range(begin, end) if math.isfinite(series.y[i])] or [begin]
        positions |= {min(finite, key=series.y.__getitem__), max(finite, key=series.y.__getitem__)}
    retained = sorted(positions)
    return [series.x[i] for i in retained], [series.y[i] for i in retained]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST < value < LARGEST


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of groups and lists under one name each: datasets.place.share, gpu.0."""
    for name, value in values.items():
        if name in IGNORED:
            continue
        if isinstance(value, list):
            value = _listed(value)
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _listed(values: list[Any]) -> dict[Any, Any]:
    if len(values) > MAX_LIST and all(map(_is_number, values)):
        return {"mean": sum(values) / len(values), "lowest": min(values), "highest": max(values)}
    return dict(enumerate(values))
