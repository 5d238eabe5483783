"""Scripts and benchmarks import: what they use of Flexor exists."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [*ROOT.glob("scripts/*.py"), *ROOT.glob("benchmarks/*.py")]
ELSEWHERE = ("lerobot", "gym_pusht")  # may be missing: what some are compared with or run in


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_imports(file, monkeypatch):
    monkeypatch.syspath_prepend(file.parent)
    try:
        importlib.import_module(file.stem)
    except ModuleNotFoundError as error:
        if str(error.name).split(".")[0] not in ELSEWHERE:
            raise
        pytest.skip(f"needs {error.name}")
