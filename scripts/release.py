"""Make a release: version, changelog, tag, wheel and source distribution. Without --apply, only check and print.

    python scripts/release.py 0.2.0             checks, and prints the release notes
    python scripts/release.py 0.2.0 --apply     writes the version, commits, tags, and builds into dist/
    python scripts/release.py --build dist      only builds what is here

The release notes are the section "Not released yet" of CHANGELOG.md. Nothing is pushed or uploaded: the last lines say
how to do that.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGED = ("src", "client", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
UNRELEASED = "## Not released yet"
BUILD = "from setuptools import build_meta; print(getattr(build_meta, '{kind}')({folder!r}))"


class ReleaseError(Exception):
    """Something is missing or wrong. The message says what to do."""


@dataclass
class Repository:
    root: Path

    @property
    def version_files(self) -> dict[Path, str]:
        """The files that state the version, each with the pattern of its line. The robot's package has its own."""
        return {
            self.root / "src/flexor/core/version.py": r'^(VERSION = ")(.*)(")$',
            self.root / "client/pyproject.toml": r'^(version = ")(.*)(")$',
        }

    def version(self) -> str:
        versions = set()
        for path, pattern in self.version_files.items():
            match = re.search(pattern, path.read_text(), re.MULTILINE)
            if match is None:
                raise ReleaseError(f"{path} has no line with the version.")
            versions.add(match[2])
        if len(versions) > 1:
            names = ", ".join(str(path.relative_to(self.root)) for path in self.version_files)
            raise ReleaseError(
                f"These files state different versions, {' and '.join(sorted(versions))}: {names}."
            )
        return versions.pop()

    @property
    def changelog(self) -> Path:
        return self.root / "CHANGELOG.md"

    def notes(self) -> str:
        """The changelog's section of what was not released yet."""
        section = self.changelog.read_text().partition(f"{UNRELEASED}\n")[2].partition("\n## ")[0].strip()
        if not section:
            raise ReleaseError(
                f'CHANGELOG.md has nothing under "{UNRELEASED}": say there what is new for users.'
            )
        return section

    def git(self, *words: str) -> str:
        command = ["git", "-C", str(self.root), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ReleaseError(f"git {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def check(self, version: str) -> None:
        """That this release can be made now."""
        if not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version):
            raise ReleaseError(f"{version} is no version: give MAJOR.MINOR.PATCH, such as 0.2.0 or 0.2.0rc1.")
        tags = self.git("tag", "--list", "v*").split()
        if f"v{version}" in tags:
            raise ReleaseError(f"The tag v{version} exists: choose the next version.")
        newest = max([*tags, f"v{self.version()}"] if tags else ["v0.0.0"], key=order)
        if order(f"v{version}") <= order(newest) and f"v{version}" != newest:
            raise ReleaseError(f"{version} is not newer than {newest.removeprefix('v')}.")
        if changed := self.git("status", "--porcelain"):
            raise ReleaseError(f"Commit these changes first:\n{changed}")
        self.notes()

    def write(self, version: str, day: datetime.date) -> None:
        """The version, and the changelog's new heading."""
        for path, pattern in self.version_files.items():
            path.write_text(
                re.sub(pattern, rf"\g<1>{version}\g<3>", path.read_text(), count=1, flags=re.MULTILINE)
            )
        heading = f"{UNRELEASED}\n\n## {version} ({day.isoformat()})\n"
        self.changelog.write_text(self.changelog.read_text().replace(f"{UNRELEASED}\n", heading, 1))

    def tag(self, version: str, notes: str) -> None:
        self.git("add", "-u")
        self.git("commit", "--quiet", "-m", f"Version {version}")
        self.git(
            "tag", "--annotate", f"v{version}", "-m", f"Flexor {version}\n\n{notes}", "--cleanup=verbatim"
        )


def order(tag: str) -> tuple[int, ...]:
    """A release candidate comes before its release."""
    numbers, _, candidate = tag.removeprefix("v").partition("rc")
    return (*map(int, numbers.split(".")), int(candidate) if candidate else sys.maxsize)


def build(root: Path, folder: Path) -> list[Path]:
    """The source distribution of `root`, and the wheel that is made from it, as pip would.

    They are built from a copy: nothing that an earlier build left in the repository gets into them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist", ".*")
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "copy"
        copy.mkdir()
        for name in PACKAGED:
            if (root / name).is_dir():
                shutil.copytree(root / name, copy / name, ignore=ignored)
            else:
                shutil.copy2(root / name, copy / name)
        source = call_setuptools(copy, "build_sdist", folder)
        shutil.unpack_archive(source, Path(temporary) / "unpacked", filter="data")
        (unpacked,) = (Path(temporary) / "unpacked").iterdir()
        return [source, call_setuptools(unpacked, "build_wheel", folder)]


def call_setuptools(source: Path, kind: str, folder: Path) -> Path:
    """One of the backend's functions, in a process of its own; returns the file that it wrote."""
    code = BUILD.format(kind=kind, folder=str(folder.resolve()))
    environment = {"SOURCE_DATE_EPOCH": "1577836800", **os.environ}  # the same files give the same wheel
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ReleaseError(f"{kind} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return folder / done.stdout.split()[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", nargs="?", help="of the release, such as 0.2.0")
    parser.add_argument("--apply", action="store_true", help="write, commit, tag and build")
    parser.add_argument(
        "--build", type=Path, metavar="DIR", help="only build the wheel and the source distribution"
    )
    options = parser.parse_args(arguments)
    if (options.version is None) == (options.build is None):
        parser.error("give a version, or --build=DIR")
    repository = Repository(ROOT)
    try:
        if options.build is not None:
            print(*build(ROOT, options.build), sep="\n")
            return 0
        repository.check(options.version)
        notes = repository.notes()
        print(f"Flexor {options.version}, after {repository.version()}\n\n{notes}\n")
        if not options.apply:
            print("Nothing was changed. --apply writes the version, commits, tags and builds.")
            return 0
        repository.write(options.version, datetime.datetime.now(datetime.UTC).date())
        repository.tag(options.version, notes)
        print(*build(ROOT, ROOT / "dist"), sep="\n")
        print(
            f"Publish it: git push --follow-tags, then upload these two files. Undo it: git tag -d v{options.version}"
        )
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
