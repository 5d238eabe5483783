"""requirements.lock fits pyproject.toml and constraints.txt: whoever changes one of them is told to make it again."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
AGAIN = "run scripts/lock_requirements.py"


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(file: str = "requirements.lock") -> dict[str, tuple[str, int]]:
    """Each package with its version, and how many hashes it has."""
    text = (ROOT / file).read_text()
    entries = re.findall(r"^([\w.-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.M)
    return {plain(name): (version, hashes.count("--hash")) for name, version, hashes in entries}


@pytest.mark.parametrize("file", ["requirements.lock", "scripts/site.lock"])
def test_every_line_is_understood(file):
    lines = (ROOT / file).read_text().splitlines()
    assert len([line for line in lines if "==" in line]) == len(locked(file)) > 25
    assert all(line.startswith(("#", "    --hash=sha256:")) or "==" in line for line in lines)


def test_versions_are_those_of_the_constraints():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {plain(name): version for name, version in (line.split("==") for line in lines if line)}
    assert {name: version for name, (version, _) in locked().items()}.items() <= pinned.items(), AGAIN


def test_all_that_development_needs_is_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["dev"], "setuptools"]
    names = {plain(re.split(r"[^\w.-]", requirement)[0]) for requirement in needed}
    assert names - locked().keys() == {"torch"}, AGAIN
