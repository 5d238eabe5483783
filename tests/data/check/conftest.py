"""A dataset to break."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def copy(originals: Path, tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        return Path(shutil.copytree(originals / name, tmp_path / name))

    return make
