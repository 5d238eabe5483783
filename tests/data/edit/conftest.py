"""Datasets to edit."""

import shutil
from pathlib import Path

import pytest

from support.small_datasets import encoded, write


@pytest.fixture(scope="session")
def originals(originals: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """And those with AV1 and with B-frames. Only to be read."""
    root = Path(shutil.copytree(originals, tmp_path_factory.mktemp("edit") / "originals"))
    write(root / "av1", codec="av1", gop=4)
    shutil.copytree(root / "one", root / "b-frames")
    encoded(bf="3", g="250", sc_threshold="0")(root / "b-frames")
    return root
