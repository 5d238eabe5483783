"""Which tests run where, in which order, and which not at all on this machine."""

import pytest
import torch


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests belong together where two workers share them, and which come first.

    Those of a file share what it makes. Those that start many processes come one after the other, and begin at once,
    for they take longest.
    """
    groups = {item: _group(item) for item in items}
    items.sort(key=lambda item: groups[item] != "processes")
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))


def _group(item: pytest.Item) -> str:
    return "processes" if item.path.parent.name in ("distributed", "launch") else item.path.stem


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
