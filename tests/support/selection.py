"""Which tests run on which worker, in which order, and which not at all on this machine.

With `pytest -n 4 --dist loadgroup`, tests of a file go to one worker: they share what it makes. Those that start
ranks, or other processes of the program that are forked, go to one worker too, wherever their files are: they would
slow each other down, and one process to fork from is enough. Those of them that mostly wait, `ranks(waits=True)`, go to
another one: what they leave of the cores is for those that compute. These two have the most to do, so they begin
first, and the rest takes what they leave. A machine with many cores has a worker for each file of them, and for each
test that needs a GPU: those take long, and most of them are in a few files.

xdist has a mark for groups. It puts it into the names of tests, which newer versions of pytest do not let it change:
there every test would be a group of its own. So workers write down the groups, and the scheduler reads them.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

_running: pytest.Item | None = None
# Of workers, by what they begin with: who mostly waits need not wait for a core.
NICE = {"waiting ranks": 0, "ranks": 5}
LEAST = 10  # of those that begin with other tests
MANY = 8  # cores, on which processes of several tests do not slow each other down


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest begins first: the ranks, then files with slow tests."""
    together = (os.cpu_count() or 1) < MANY
    ranks = {item for item in items if item.get_closest_marker("ranks")}
    groups = {item: _group(item, together) for item in items}
    slow = {groups[item] for item in items if item.get_closest_marker("slow") or _alone(item, together)}
    first = {groups[item] for item in ranks}
    items.sort(key=lambda item: (groups[item] not in first, groups[item] not in slow))
    if "groups" in getattr(config, "workerinput", {}):
        file = Path(config.workerinput["groups"])  # type: ignore[attr-defined]
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({item.nodeid: groups[item] for item in items}))
        part.rename(file)  # every worker writes the same


def _group(item: pytest.Item, together: bool) -> str:
    if _alone(item, together):
        return item.nodeid
    return (together and chain(item)) or item.path.name


def _alone(item: pytest.Item, together: bool) -> bool:
    return not together and item.get_closest_marker("gpu") is not None


def chain(item: pytest.Item) -> str | None:
    """Of the tests that start processes, those it runs after and before on a machine with few cores."""
    mark = item.get_closest_marker("ranks")
    return mark and ("waiting ranks" if mark.kwargs.get("waits") else "ranks")


def pytest_collection_finish() -> None:
    """What all test files import lives to the end: the search for garbage need not look through it each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["groups"] = str(_groups_file())


def _groups_file() -> Path:
    return Path(os.environ["HOME"]) / "groups.json"  # of the process that starts the workers


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def schedule(self) -> None:
            self.groups = json.loads(_groups_file().read_text())
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            return self.groups[nodeid]

    config.option.loadscopereorder = False  # the order is ours
    return ByGroup(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global _running
    if _running is None and "PYTEST_XDIST_WORKER" in os.environ:
        os.nice(NICE.get(chain(item), LEAST))
    _running = item
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")
    if item.get_closest_marker("installed") and not _is_installed():
        pytest.skip("Flexor is on the path, but not installed")


def _is_installed() -> bool:
    with suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version("flexor"))
    return False


def must_be_marked() -> None:
    """Called by what starts ranks: no test does so unnoticed."""
    marked = _running is None or _running.get_closest_marker("ranks")
    assert marked, f"{_running.nodeid} starts processes of the program: mark it with pytest.mark.ranks"  # type: ignore[union-attr]
