"""Datasets that tests of several files break, mend and change."""

from pathlib import Path

import pytest

from support.legacy import to_v2
from support.small_datasets import write


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for all episodes, a file per episode, pictures in the table, and the older formats. Only to be read."""
    root = tmp_path_factory.mktemp("originals")
    write(root / "one")
    write(root / "many", data_files_mb=1e-6, video_files_mb=1e-6)
    write(root / "still", still=True)
    write(root / "gop30", gop=30)
    to_v2(root / "one", root / "v2.1", "v2.1")
    to_v2(root / "one", root / "v2.0", "v2.0")
    return root
