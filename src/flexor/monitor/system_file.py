"""`system.jsonl`: samples of the machine, in a file whose size has a limit.

The newest `RECENT` samples are kept as they are. Older ones are merged with their neighbours when there are more than
`OLDER` of them: two of 5 s become their mean over 10 s, later 20 s, and so on, until half are left. So a run of any
length has a few thousand lines at most: its last hour in full, the rest coarser. `span` is the number of seconds that a
line covers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flexor.core.errors import UNWRITABLE
from flexor.core.lines import LineFile
from flexor.core.output_paths import replacing
from flexor.core.run_files import SYSTEM
from flexor.runs.jsonl import GrowingLines

RECENT = 720  # an hour, at a sample every 5 s
OLDER = 2000
SUMMED = ("span", "energy_j")
NEWEST = ("time", "step", "index", "name")
USUAL = {"power_cap", "sync_boost"}  # reasons for lower clocks that a GPU with much to do has anyway

Line = dict[str, Any]


def system_file(folder: Path, rank: int) -> Path:
    """The file of the host whose first process has this rank."""
    return folder / (SYSTEM if rank == 0 else f"{Path(SYSTEM).stem}-{rank}{Path(SYSTEM).suffix}")


def system_files(folder: Path) -> list[Path]:
    """The files of all hosts, that of rank 0 first."""
    other_hosts = sorted(folder.glob(f"{Path(SYSTEM).stem}-*{Path(SYSTEM).suffix}"))
    return [path for path in (folder / SYSTEM, *other_hosts) if path.is_file()]


def read_lines(path: Path) -> list[Line]:
    """The JSON objects of a file that have a step. A truncated line is left out."""
    return [line for line in GrowingLines(path).read()[1] if isinstance(line.get("step"), int)]


def write_lines(path: Path, lines: list[Line]) -> None:
    """All at once: a kill leaves the old file or the new one."""
    with replacing(path) as aside:
        aside.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def forget_after(path: Path, step: int) -> None:
    """Remove the lines of steps that will be repeated, and a truncated last line."""
    if not path.is_file():
        return
    try:
        write_lines(path, [line for line in read_lines(path) if line["step"] <= step])
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        _cut_after(path, step)


def _cut_after(path: Path, step: int) -> None:
    """The same on a full disk, in place: cut the file before the first line of a later step."""
    end = 0
    with path.open("r+b") as file:
        for text in file:
            try:
                later = json.loads(text)["step"] > step
            except (ValueError, KeyError, TypeError):
                later = False
            if later or not text.endswith(b"\n"):
                break
            end += len(text)
        file.truncate(end)


class SystemFile:
    """Appends samples, and merges old ones now and then. Only one thread uses it."""

    def __init__(self, path: Path, recent: int = RECENT, older: int = OLDER):
        self.path, self.recent, self.older = path, recent, older
        self.file: LineFile | None = None
        self.count = 0  # lines in the file

    def append(self, line: Line) -> None:
        if self.file is None:
            self.file, self.count = LineFile(self.path), len(read_lines(self.path))
        self.file.write(json.dumps(line))
        self.count += 1
        if self.count > self.recent + self.older and not self.file.waiting:
            self.file.close()  # it is replaced
            lines = read_lines(self.path)
            compacted = thinned(lines[: -self.recent], self.older // 2) + lines[-self.recent :]
            write_lines(self.path, compacted)
            self.count = len(compacted)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def thinned(lines: list[Line], limit: int) -> list[Line]:
    """At most `limit` lines: neighbours are merged, the shortest spans first."""
    span = min((_span(line) for line in lines), default=0)
    while len(lines) > max(limit, 1):
        span *= 2
        merged: list[Line] = []
        for line in lines:
            if merged and _span(merged[-1]) + _span(line) <= span * 1.01:
                merged[-1] = merge(merged[-1], line)
            else:
                merged.append(line)
        lines = merged
    return lines


def _span(line: Line) -> float:
    value = line.get("span")
    return max(float(value), 1e-3) if isinstance(value, int | float) else 1e-3


def merge(first: Line, second: Line) -> Line:
    """One line for two: means over the time, energy summed, reasons of both, and the step of the second."""
    return _merged(first, second, _span(first) / (_span(first) + _span(second)))


def _merged(first: Any, second: Any, share: float, name: str = "") -> Any:
    """`share`: the part of the first in the time of both."""
    if isinstance(first, dict) and isinstance(second, dict):
        return {
            key: _merged(first[key], second[key], share, key) if key in first and key in second else value
            for key, value in {**first, **second}.items()
        }
    if isinstance(first, list) and isinstance(second, list):
        return _merged_lists(first, second, share)
    if name in NEWEST or not (_is_number(first) and _is_number(second)):
        return second
    return round(first + second, 3) if name in SUMMED else round(share * first + (1 - share) * second, 4)


def _merged_lists(first: list[Any], second: list[Any], share: float) -> list[Any]:
    """Reasons: their union. Cores and GPUs: one by one, if their number is the same."""
    if all(isinstance(item, str) for item in (*first, *second)):
        return list(dict.fromkeys((*first, *second)))
    if len(first) != len(second):
        return second
    return [_merged(a, b, share) for a, b in zip(first, second)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def for_log(line: Line) -> Line:
    """A sample, to be merged with others for a log line: whether GPUs were throttled becomes a share of the time, and
    whether it was for another reason than their power limit."""
    short = {name: value for name, value in line.items() if name != "cpu_cores"}
    gpus = line.get("gpus", ())
    if not gpus:
        return short
    reasons = {reason for gpu in gpus for reason in gpu.get("throttled", ())}
    return {**short, "gpu_throttled": float(bool(reasons)), "gpu_slowed": float(bool(reasons - USUAL))}


def summary(merged: Line | None) -> dict[str, float]:
    """The `system` of a line of `metrics.jsonl`, from samples merged into one: means over the run's GPUs too."""
    if merged is None:
        return {}
    figures = {
        name: round(float(value), 4)
        for name, value in merged.items()
        if _is_number(value) and name not in (*NEWEST, "span")
    }
    gpus = [gpu for gpu in merged.get("gpus", ()) if isinstance(gpu, dict)]
    for name in sorted({name for gpu in gpus for name in gpu if name not in NEWEST}):
        values = [gpu[name] for gpu in gpus if _is_number(gpu.get(name))]
        if values:
            figures[f"gpu_{name}"] = round(sum(values) / (1 if name in SUMMED else len(values)), 4)
    return figures


def over_hosts(hosts: list[dict[str, float]]) -> dict[str, float]:
    """Summaries of several hosts as one: means, and energy summed."""
    names = dict.fromkeys(name for host in hosts for name in host)
    columns = {name: [host[name] for host in hosts if name in host] for name in names}
    return {
        name: round(sum(values) / (1 if name.removeprefix("gpu_") in SUMMED else len(values)), 4)
        for name, values in columns.items()
    }
