"""The manifest of a checkpoint: its files with sizes and hashes. What is loaded must be what was saved."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from flexor.core.errors import CheckpointError
from flexor.core.foreign_files import MALFORMED, parse_json, read_text
from flexor.core.paths import inside, safe_name
from flexor.core.run_files import MANIFEST, PRETRAINED


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ListedFile(NamedTuple):
    """A file as the manifest has it."""

    size: int
    sha256: str


SAVED, EXPORTED = "files", "exported"
"""The parts of a manifest: what a checkpoint was saved with, and what was made of it later and may be deleted again."""


def parse_manifest(text: bytes | str, part: str = SAVED) -> dict[str, ListedFile]:
    """The files that a manifest lists, by name. A ValueError for anything that is no manifest."""
    try:
        files = {EXPORTED: {}, **parse_json(text)}[part]
        return {safe_name(n): ListedFile(int(file["size"]), str(file["sha256"])) for n, file in files.items()}
    except MALFORMED as error:
        raise ValueError(f"{MANIFEST} can't be read ({error!r})") from error


def read_manifest(checkpoint: Path, part: str = SAVED) -> dict[str, ListedFile]:
    try:
        return parse_manifest(read_text(inside(checkpoint, MANIFEST)), part)
    except OSError as error:
        raise ValueError(f"{MANIFEST} can't be read ({error!r})") from error


def difference(checkpoint: Path, folder: str = "") -> str | None:
    """What differs from the manifest, as part of a sentence; None if nothing does. `folder`: only files in it."""
    try:
        listed, later = read_manifest(checkpoint), read_manifest(checkpoint, EXPORTED)
        listed |= {name: file for name, file in later.items() if inside(checkpoint, name).is_file()}
        paths = {name: inside(checkpoint, name) for name in listed if name.startswith(folder)}
    except ValueError as error:
        return str(error)
    for name, path in paths.items():
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != listed[name].size or hash_file(path) != listed[name].sha256:
            return f"{name} has changed since it was saved"
    return None


def verify_policy(folder: Path) -> None:
    """Refuse a policy in a checkpoint whose files are not those that were saved. Other folders have no manifest."""
    folder = Path(os.path.realpath(folder))  # it may be given as a link, or as the folder that the user is in
    checkpoint = folder.parent
    if folder.name != PRETRAINED or not (checkpoint / MANIFEST).is_file():
        return
    if wrong := difference(checkpoint, f"{PRETRAINED}/"):
        raise CheckpointError(
            f"{checkpoint} is damaged: {wrong}. Use another checkpoint, or copy this one again. If you changed the "
            f"file yourself, copy {folder} out of the checkpoint and use the copy."
        )
