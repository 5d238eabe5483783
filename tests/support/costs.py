"""What tests cost: processor seconds, which unlike a clock's do not depend on how busy the machine is.

    PYTEST_COSTS=FOLDER python -m pytest -p support.costs -n 2 tests/plan      a file in the folder for each worker
    python tests/support/costs.py FOLDER                                       the dearest files, tests and fixtures

All processes that a worker started count, also those that are still there. A second that two tests' processes take at
the same time is the test's that is running.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

FOLDER = "PYTEST_COSTS"
LINES = 40
LEAST_S = 0.02  # of a fixture
TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds(pid: str = "self") -> float:
    """Of this process and all below it, also of those that have ended. As Linux tells it: quickly."""
    folder, seconds = Path("/proc") / pid, 0.0
    with suppress(OSError):  # it has just ended
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        seconds = sum(map(int, fields[11:15])) / TICKS  # user, system, and of children waited for
        for task in (folder / "task").iterdir():
            seconds += sum(map(processor_seconds, (task / "children").read_text().split()))
    return seconds


@contextmanager
def noted(kind: str, name: str, least: float = 0.0) -> Iterator[None]:
    before = processor_seconds()
    yield
    taken = processor_seconds() - before
    if taken >= least:
        line = json.dumps({"kind": kind, "name": name, "seconds": round(taken, 3)})
        with (Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(f"{line}\n")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Any:
    Path(os.environ[FOLDER]).mkdir(parents=True, exist_ok=True)
    with noted("file", "(imports and collection)"):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    with noted("test", item.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Any:
    with noted("fixture", f"{request.node.nodeid or 'session'}: {fixturedef.argname}", LEAST_S):
        return (yield)


def ranking(folder: Path) -> str:
    seconds: dict[str, Counter[str]] = {"file": Counter(), "test": Counter(), "fixture": Counter()}
    for file in folder.glob("*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            seconds[line["kind"]][line["name"]] += line["seconds"]
            if line["kind"] == "test":
                seconds["file"][line["name"].partition("::")[0]] += line["seconds"]
    parts = [f"{sum(seconds['file'].values()):.0f} processor seconds, {len(seconds['test'])} tests"]
    for kind, counts in seconds.items():
        parts += [f"\n{kind}s", *(f"{taken:8.1f} {name}" for name, taken in counts.most_common(LINES))]
    return "\n".join(parts)


if __name__ == "__main__":
    print(ranking(Path(sys.argv[1])))
