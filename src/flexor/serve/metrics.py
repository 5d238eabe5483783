"""What a server counts and times: for Prometheus, for the page, and for `flexor bench serve`."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

PARTS = ("decode", "queue", "model", "encode", "total")
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
BATCHES = (1, 2, 4, 8, 16, 32)
RESULTS = ("ok", "expired", "refused", "failed", "not_finite")
COUNTS = ("bytes_in", "bytes_out", "connections", "refused_connections", "delayed")
RECENT = 2000  # requests, for percentiles


class Histogram:
    """Counts of values up to each bound, as Prometheus has them."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.counts = bounds, [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def plain(self) -> list[float]:
        return [*self.counts, self.total]

    def include(self, plain: Sequence[float]) -> None:
        """Add the counts of another one."""
        *counts, total = plain
        self.counts = [int(a + b) for a, b in zip(self.counts, counts, strict=True)]
        self.total += total

    def lines(self, name: str, labels: str = "") -> list[str]:
        lines, cumulative = [], 0
        for bound, count in zip((*(f"{b:g}" for b in self.bounds), "+Inf"), self.counts):
            cumulative += count
            bucket = _labels(labels, f'le="{bound}"')
            lines.append(f"{name}_bucket{bucket} {cumulative}")
        return [
            *lines,
            f"{name}_sum{_labels(labels)} {self.total:.9g}",
            f"{name}_count{_labels(labels)} {cumulative}",
        ]


class Metrics:
    """All figures of a server since it started."""

    def __init__(self) -> None:
        self.results: Counter[str] = Counter()
        self.parts = {part: Histogram(SECONDS) for part in PARTS}
        self.batch = Histogram(BATCHES)
        self.bytes_in = self.bytes_out = 0
        self.connections = self.refused_connections = self.delayed = 0
        self.recent: deque[tuple[float, ...]] = deque(maxlen=RECENT)  # seconds of each part

    def answered(self, seconds: Mapping[str, float], batch: int) -> None:
        for part, value in seconds.items():
            self.parts[part].add(value)
        self.batch.add(batch)
        self.recent.append(tuple(seconds[part] for part in PARTS))

    def plain(self) -> dict[str, Any]:
        """All of it as numbers, lists and maps, for another process."""
        return {
            "results": dict(self.results),
            "parts": {part: histogram.plain() for part, histogram in self.parts.items()},
            "batch": self.batch.plain(),
            "counts": [getattr(self, name) for name in COUNTS],
            "recent": [list(times) for times in self.recent],
        }

    @classmethod
    def merge(cls, plain: Iterable[Mapping[str, Any]]) -> Metrics:
        """What several processes counted."""
        merged = cls()
        merged.recent = deque()  # all of them
        for counts in plain:
            merged._include(counts)
        return merged

    def _include(self, plain: Mapping[str, Any]) -> None:
        self.results.update(plain["results"])
        for part, histogram in self.parts.items():
            histogram.include(plain["parts"][part])
        self.batch.include(plain["batch"])
        for name, value in zip(COUNTS, plain["counts"], strict=True):
            setattr(self, name, getattr(self, name) + value)
        self.recent.extend(map(tuple, plain["recent"]))

    def percentiles(self) -> dict[str, dict[str, float]]:
        """Milliseconds of the last requests, by part."""
        if not self.recent:
            return {}
        values = np.percentile(1e3 * np.array(self.recent), (50, 95, 99), axis=0)
        columns = zip(PARTS, values.T.tolist())
        return {part: dict(zip(("p50", "p95", "p99"), column)) for part, column in columns}

    def prometheus(self, gauges: Mapping[str, tuple[str, float]], about: Mapping[str, str]) -> str:
        """Prometheus' text format. `gauges`: {name: (help, value)}."""
        labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in about.items())
        lines = [*_head("flexor_info", "gauge", "what is served"), f"flexor_info{{{labels}}} 1"]
        lines += _head("flexor_requests_total", "counter", "requests by result")
        lines += [f'flexor_requests_total{{result="{name}"}} {self.results[name]}' for name in RESULTS]
        lines += _head("flexor_request_seconds", "histogram", "seconds of each part of a request")
        for part, histogram in self.parts.items():
            lines += histogram.lines("flexor_request_seconds", f'part="{part}"')
        lines += _head("flexor_batch_size", "histogram", "requests that were predicted together")
        lines += self.batch.lines("flexor_batch_size")
        for name, text, count in (
            ("received_bytes", "bytes of observations", self.bytes_in),
            ("sent_bytes", "bytes of results", self.bytes_out),
            ("connections", "connections that were accepted", self.connections),
            ("refused_connections", "connections without the key, or too many", self.refused_connections),
            ("delayed_requests", "requests above the rate limit, answered later", self.delayed),
        ):
            lines += [*_head(f"flexor_{name}_total", "counter", text), f"flexor_{name}_total {count}"]
        for name, (text, value) in gauges.items():
            lines += [*_head(f"flexor_{name}", "gauge", text), f"flexor_{name} {value:.9g}"]
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _labels(*labels: str) -> str:
    joined = ",".join(label for label in labels if label)
    return f"{{{joined}}}" if joined else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
