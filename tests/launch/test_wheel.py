"""The wheel of the Flexor that runs here: pip installs it, it runs, and a changed one is refused."""

import hashlib
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

import flexor
from flexor import __version__
from flexor.core.errors import ConfigError
from flexor.launch.wheel import Wheel, constraints, flexor_wheel, read_wheel
from support import environment
from support.limits import LIMIT_S

pytestmark = pytest.mark.installed


@pytest.fixture(scope="module")
def wheel() -> Wheel:
    return flexor_wheel()


def install(wheel: Wheel, mount: Path, target: Path, extras: str = "") -> subprocess.CompletedProcess[str]:
    """As a job installs it, without what it depends on."""
    requirement = wheel.requirement(PurePosixPath(mount), extras)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    return subprocess.run(
        [*command, f"--target={target}", requirement], capture_output=True, text=True, timeout=LIMIT_S
    )


def store(wheel: Wheel, mount: Path, content: bytes | None = None) -> None:
    file = mount / wheel.place
    file.parent.mkdir(parents=True)
    file.write_bytes(wheel.content if content is None else content)


def test_it_is_installed_and_runs(wheel, tmp_path):
    store(wheel, tmp_path / "bucket")
    installed = install(wheel, tmp_path / "bucket", tmp_path / "here", "vla")
    assert installed.returncode == 0, installed.stderr
    env = environment.for_cpu(PYTHONPATH=str(tmp_path / "here"))
    code = "import flexor, flexor_client, flexor.cli.main; print(flexor.__file__, flexor_client.__file__)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ran.stdout.split() == [
        f"{tmp_path}/here/flexor/__init__.py",
        f"{tmp_path}/here/flexor_client/__init__.py",
    ]
    ours = Path(flexor.__file__).parent
    data = [
        p.relative_to(ours) for p in ours.rglob("*") if p.suffix in (".json", ".css", ".js", ".yaml", ".toml")
    ]
    assert data and all((tmp_path / "here/flexor" / path).is_file() for path in data)


def test_a_wheel_that_was_changed_is_not_installed(wheel, tmp_path):
    store(wheel, tmp_path / "bucket", wheel.content + b" ")
    refused = install(wheel, tmp_path / "bucket", tmp_path / "here")
    assert refused.returncode != 0 and "DO NOT MATCH THE HASHES" in refused.stderr
    assert not (tmp_path / "here").exists()


def test_the_same_files_give_the_same_wheel(wheel):
    assert flexor_wheel() == wheel and hashlib.sha256(wheel.content).hexdigest() == wheel.sha256


def test_versions_are_those_of_this_machine():
    pinned = dict(line.split("==") for line in constraints([]))
    assert pinned["flexor"] == __version__ and {"torch", "numpy", "huggingface-hub", "anyio"} < pinned.keys()
    assert "aiohttp" in pinned  # of fsspec[http]
    assert "pytest" not in pinned and not any("+" in version for version in pinned.values())
    assert "transformers" in dict(line.split("==") for line in constraints(["vla"]))


def test_what_is_not_installed_here_is_named(log_lines):
    assert not any(line.startswith("trackio==") for line in constraints(["trackio"]))
    assert any("trackio is not installed here" in line for line in log_lines)


@pytest.mark.parametrize(
    "name", ["x.whl", "x-1.0.tar.gz", "x-1.0-py3-none-any.whl/..", "none-1.0-py3-none-any.whl"]
)
def test_what_is_no_wheel(name, tmp_path):
    (tmp_path / "x.whl").touch()
    (tmp_path / "x-1.0.tar.gz").touch()
    with pytest.raises(ConfigError, match="is not a wheel"):
        read_wheel(tmp_path / name)
