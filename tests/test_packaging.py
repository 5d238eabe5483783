"""The wheel and the source distribution: complete, of the right version, and used by the Dockerfile."""

import re
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import release

from flexor.core.version import VERSION
from flexor.launch.wheel import flexor_wheel

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> list[Path]:
    return release.build(ROOT, tmp_path_factory.mktemp("dist"))


def package_files() -> set[str]:
    """Every file of both packages, as named in a wheel."""
    packages = (ROOT / "src/flexor", ROOT / "client/src/flexor_client")
    files = (path for root in packages for path in root.rglob("*") if path.is_file())
    return {
        path.relative_to(ROOT / ("src" if ROOT / "src" in path.parents else "client/src")).as_posix()
        for path in files
        if "__pycache__" not in path.parts
    }


def test_the_wheel_has_every_file_of_the_packages(distributions):
    source, wheel = distributions
    assert (source.name, wheel.name) == (f"flexor-{VERSION}.tar.gz", f"flexor-{VERSION}-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        about = message_from_string(archive.read(f"flexor-{VERSION}.dist-info/METADATA").decode())
    assert names == package_files()
    assert any(name.endswith(".yaml") for name in names) and any(name.endswith(".js") for name in names)
    assert about["Version"] == VERSION and about["License-Expression"] == "Apache-2.0"


def test_the_source_distribution_has_no_tests_and_no_leftovers(distributions):
    with tarfile.open(distributions[0]) as archive:
        names = archive.getnames()
    assert not any("/tests/" in name or "__pycache__" in name or "/docs/" in name for name in names)


@pytest.mark.installed
def test_a_job_installs_the_files_of_the_wheel(distributions):
    with zipfile.ZipFile(distributions[1]) as archive:
        built = {n: archive.read(n) for n in archive.namelist() if ".dist-info/" not in n}
    sent = {name: data for name, data in flexor_wheel().files().items() if ".dist-info/" not in name}
    assert sent == built


# --- the image


def instructions() -> list[tuple[str, str]]:
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    return [
        (line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line and not line.startswith("#")
    ]


def test_the_dockerfile_copies_what_is_there():
    copied = [words.split()[:-1] for name, words in instructions() if name == "COPY"]
    sources = [word for words in copied if not words[0].startswith("--from=") for word in words]
    assert sources and [word for word in sources if not (ROOT / word).exists()] == []
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*" and {f"!{word}" for word in sources} == set(ignored[1:]) - {"**/__pycache__"}
    for word in ("pyproject.toml", "src", "client", "README.md", "LICENSE", "MANIFEST.in", "constraints.txt"):
        assert word in sources


def test_the_dockerfile_uses_a_python_and_extras_that_exist():
    text = (ROOT / "Dockerfile").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    bases = [words for name, words in instructions() if name == "FROM"]
    pythons = {re.search(r"python:([\d.]+)", base)[1] for base in bases}
    assert pythons == {"3.12"}  # what hf-jobs takes by default, too
    (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", text)
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras.split(","))
