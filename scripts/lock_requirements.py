"""Writes requirements.lock: the packages of a set-up for development, each with the hashes of its files.

    .venv/bin/python scripts/lock_requirements.py
    .venv-site/bin/python scripts/lock_requirements.py --site     writes scripts/site.lock, for `make site`

Run it after a change of constraints.txt, in an environment with these versions. The packages are what `flexor[dev]`
needs on the machines below, in the versions of constraints.txt. The hashes are those that pip's index states. torch and
CUDA's libraries are left out: which build is right depends on the machine (see the Makefile). The site's packages are
those that MkDocs Material needs, in the versions that are installed beside it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from pip._internal.models.index import PyPI

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
SITE_LOCK = ROOT / "scripts" / "site.lock"
SITE = "mkdocs-material"
INDEX = os.environ.get("PIP_INDEX_URL") or PyPI.simple_url
BUILDING = (
    "pip",
    "setuptools",
    "wheel",
)  # what is needed to install Flexor itself; of these, those that are pinned
MADE = f"# Made by scripts/{Path(__file__).name}"
HEADING = f"{MADE} from constraints.txt. `make setup` installs it with --require-hashes."
SITE_HEADING = f"{MADE} --site. `make site` installs it with --require-hashes."
LEFT_OUT = ("torch", "flexor")
MACHINES = [
    {"sys_platform": system, "platform_system": name, "platform_machine": machine, "os_name": "posix"}
    | {"python_version": python, "python_full_version": f"{python}.0", "implementation_name": "cpython"}
    for system, name, machine in (
        ("linux", "Linux", "x86_64"),
        ("linux", "Linux", "aarch64"),
        ("darwin", "Darwin", "arm64"),
    )
    for python in ("3.11", "3.12", "3.13")
]
PYTHONS = ("cp311", "cp312", "cp313", "py3", "py2.py3")
PLATFORM = re.compile(r"any|manylinux.*_(x86_64|aarch64)|linux_(x86_64|aarch64)|macosx_.*(arm64|universal2)")


def main(arguments: Sequence[str] = ()) -> int:
    if "--site" in arguments:
        names = needed((SITE, ""))
        installed = {canonicalize_name(d.name): d.version for d in importlib.metadata.distributions()}
        return write(SITE_LOCK, sorted(names & installed.keys()), installed, SITE_HEADING)
    versions = read_constraints()
    names = needed(("flexor", "dev"), ("flexor", ""))
    missing = sorted(names - versions.keys() - {*LEFT_OUT})
    if missing:
        print(f"constraints.txt has no version of {', '.join(missing)}", file=sys.stderr)
        return 1
    return write(LOCK, sorted({*names, *BUILDING} & versions.keys()), versions, HEADING)


def write(lock: Path, names: Sequence[str], versions: Mapping[str, str], heading: str) -> int:
    with ThreadPoolExecutor(8) as pool:
        hashes = dict(zip(names, pool.map(lambda name: file_hashes(name, versions[name]), names)))
    lines = [heading]
    for name in names:
        if not hashes[name]:
            print(f"The index has no hashes of {name} {versions[name]}", file=sys.stderr)
            return 1
        lines += [f"{name}=={versions[name]} \\", *(f"    --hash=sha256:{h} \\" for h in hashes[name][:-1])]
        lines.append(f"    --hash=sha256:{hashes[name][-1]}")
    lock.write_text("\n".join(lines) + "\n")
    return 0


def read_constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs if name not in LEFT_OUT}


def needed(*roots: tuple[str, str]) -> set[str]:
    """The names of all packages that these, each with an extra or none, need on any of the machines."""
    names: set[tuple[str, str]] = set()
    stack = [*roots]
    while stack:
        name, extra = stack.pop()
        if (name, extra) in names:
            continue
        names.add((name, extra))
        for requirement in map(Requirement, requirements(name)):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({**machine, "extra": extra}) for machine in MACHINES):
                dependency = canonicalize_name(requirement.name)
                stack += [(dependency, each) for each in ("", *requirement.extras)]
    return {name for name, _ in names if not name.startswith(("nvidia-cu", "nvidia-nv", "cuda-", "triton"))}


def requirements(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []  # of another machine: reported if it has no version


def file_hashes(name: str, version: str) -> list[str]:
    """The hashes of a version's files that may be installed on one of the machines, sorted."""
    url = f"{INDEX.rstrip('/')}/{name}/"
    request = urllib.request.Request(  # noqa: S310  (the index that pip uses)
        url, headers={"Accept": "application/vnd.pypi.simple.v1+json, text/html;q=0.5"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
        text = answer.read().decode()
    files = _json_files(text) if text.lstrip().startswith("{") else _html_files(text)
    return sorted({sha256 for file, sha256 in files if is_wanted(file, version)})


def _json_files(text: str) -> Iterator[tuple[str, str]]:
    for file in json.loads(text)["files"]:
        yield file["filename"], file["hashes"].get("sha256", "")


def _html_files(text: str) -> Iterator[tuple[str, str]]:
    links: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            links.extend(value for key, value in attrs if key == "href" and value)

    Links().feed(text)
    for link in links:
        path, _, fragment = link.partition("#sha256=")
        yield urllib.parse.unquote(path.rpartition("/")[2]), fragment


def is_wanted(file: str, version: str) -> bool:
    try:
        if not file.endswith(".whl"):
            return str(parse_sdist_filename(file)[1]) == version
        _, file_version, _, tags = parse_wheel_filename(file)
    except (InvalidWheelFilename, InvalidSdistFilename):
        return False
    fits = any(
        (tag.interpreter in PYTHONS or tag.abi == "abi3") and PLATFORM.fullmatch(tag.platform) for tag in tags
    )
    return str(file_version) == version and fits


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
