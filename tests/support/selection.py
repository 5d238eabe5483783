"""Which tests run where, in which order, and which not at all on this machine."""

from __future__ import annotations

import pytest
import torch

_running: pytest.Item | None = None


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests belong together where several workers share them, and which come first.

    Those of a file share what it makes. Those that start ranks come one after the other, wherever their files are, or
    each would slow the others down; and they begin at once, for they take longest.
    """
    groups = {item: "ranks" if item.get_closest_marker("ranks") else item.path.stem for item in items}
    items.sort(key=lambda item: groups[item] != "ranks")
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global _running
    _running = item
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


def must_be_marked() -> None:
    """Called by what starts ranks: no test does so unnoticed."""
    marked = _running is None or _running.get_closest_marker("ranks")
    assert marked, f"{_running.nodeid} starts several processes: mark it with pytest.mark.ranks"  # type: ignore[union-attr]
