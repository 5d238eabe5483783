"""The Flexor that runs here as a wheel, which a job installs: not whatever an index has under that name.

It is made of the files of this installation, be it a clone or an installed package, and checked by its hash. What it
depends on is installed in the versions that are installed here.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import io
import re
import zipfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import flexor
import flexor_client
from flexor.config.schema import TrainConfig
from flexor.core.errors import ConfigError
from flexor.core.hub_errors import refuse_secrets
from flexor.core.log import log
from flexor.core.paths import files_to_push
from flexor.core.version import VERSION

FOLDER = ".packages"  # in the bucket; no run's folder has such a name
TIME = (2020, 1, 1, 0, 0, 0)  # of all files in a wheel: the same files give the same hash
ABOUT = f"flexor-{VERSION}.dist-info"
WHEEL = "Wheel-Version: 1.0\nGenerator: flexor\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@dataclass(frozen=True)
class Wheel:
    """A package that is uploaded with the job."""

    file: str  # its name, which says what it is: flexor-0.1.0-py3-none-any.whl
    content: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def files(self) -> dict[str, bytes]:
        """Unpacked."""
        with zipfile.ZipFile(io.BytesIO(self.content)) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    @property
    def place(self) -> str:
        """Its path in the bucket."""
        return f"{FOLDER}/{self.sha256[:16]}/{self.file}"

    def requirement(self, mount: PurePosixPath, extras: str = "") -> str:
        """What pip is told to install. pip compares the hash."""
        name = self.file.split("-")[0]
        return f"{name}{f'[{extras}]' if extras else ''} @ file://{mount / self.place}#sha256={self.sha256}"


def read_wheel(path: Path) -> Wheel:
    """A wheel of the user's, such as one with a policy."""
    if not re.fullmatch(r"[\w.]+-[\w.!+]+(-[\w.]+){3,4}\.whl", path.name) or not path.is_file():
        raise ConfigError(
            f"--package={path} is not a wheel: build one with `pip wheel --no-deps FOLDER`, or give a URL."
        )
    return Wheel(path.name, path.read_bytes())


def flexor_wheel() -> Wheel:
    """The wheel of this installation."""
    packages = (Path(module.__path__[0]) for module in (flexor, flexor_client))
    paths = {f"{root.name}/{name}": path for root in packages for name, path in files_to_push(root).items()}
    paths = {name: path for name, path in paths.items() if "__pycache__/" not in name}
    refuse_secrets(paths)
    files = {name: path.read_bytes() for name, path in paths.items()}
    files[f"{ABOUT}/METADATA"] = _metadata().encode()
    files[f"{ABOUT}/WHEEL"] = WHEEL.encode()
    files[f"{ABOUT}/entry_points.txt"] = b"[console_scripts]\nflexor = flexor.cli.main:program\n"
    files[f"{ABOUT}/RECORD"] = _record(files).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, TIME), content, zipfile.ZIP_DEFLATED)
    return Wheel(f"flexor-{VERSION}-py3-none-any.whl", packed.getvalue())


def _metadata() -> str:
    """Name, version and dependencies, as the installed distribution states them."""
    try:
        about = importlib.metadata.metadata("flexor")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "Flexor is not installed here, so what it depends on is unknown. Install it: pip install -e FOLDER."
        ) from None
    lines = ["Metadata-Version: 2.1", "Name: flexor", f"Version: {VERSION}"]
    for field in ("Requires-Python", "Provides-Extra", "Requires-Dist"):
        lines += [f"{field}: {value}" for value in about.get_all(field) or ()]
    return "\n".join([*lines, ""])


def _record(files: dict[str, bytes]) -> str:
    lines = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}")
    return "\n".join([*lines, f"{ABOUT}/RECORD,,", ""])


def extras_of(config: TrainConfig) -> list[str]:
    """The extras of Flexor that a run needs."""
    extras = {"wandb": config.wandb.enable, "sim": config.env.type == "pusht"}
    extras |= dict.fromkeys(config.trackers, True)
    extras["vla"] = importlib.util.find_spec("transformers") is not None  # who has it here may need it there
    return [name for name, needed in extras.items() if needed]


def constraints(extras: Iterable[str]) -> list[str]:
    """The versions of everything that Flexor needs, with these extras, as installed here."""
    versions = {"flexor": VERSION}
    needed = _requirements("flexor", {*extras})
    first = {name for name, _ in needed}
    visited: set[tuple[str, frozenset[str]]] = set()
    while needed:
        name, its_extras = entry = needed.pop()
        if entry in visited:
            continue
        visited.add(entry)
        try:
            # torch 2.13.0+cpu is the build of 2.13.0 for this machine
            versions[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:  # an extra, or not needed on this machine
            if name in first:
                log.warning("%s is not installed here, so the job installs its newest version", name)
            continue
        needed += _requirements(name, its_extras)
    return [f"{name}=={version}" for name, version in sorted(versions.items())]


def _requirements(package: str, extras: Collection[str]) -> list[tuple[str, frozenset[str]]]:
    """What a package requires on any machine, if it is installed with these extras: names, each with its extras."""
    needed = []
    for requirement in importlib.metadata.requires(package) or ():
        parts = re.match(r"([\w.-]+)\s*(?:\[([\w\s,.-]*)\])?", requirement)
        only_for = re.search(r"extra\s*==\s*['\"]([\w.-]+)['\"]", requirement)
        if parts and (only_for is None or only_for[1] in extras):
            name = re.sub(r"[-_.]+", "-", parts[1]).lower()
            needed.append(
                (name, frozenset(word.strip() for word in (parts[2] or "").split(",") if word.strip()))
            )
    return needed
