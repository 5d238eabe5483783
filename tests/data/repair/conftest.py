"""A dataset to repair."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def broken(originals: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of an original with something done to it."""

    def make(name: str, *faults: Callable[[Path], object]) -> Path:
        root = Path(shutil.copytree(originals / name, tmp_path / name))
        for fault in faults:
            fault(root)
        return root

    return make
