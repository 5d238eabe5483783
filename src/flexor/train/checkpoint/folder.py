"""Checkpoints are complete or absent: written to a temporary folder, manifest last, then renamed.

A process may be killed at any time: a numbered folder with a manifest is always complete. The next run removes
temporary folders that are left over.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from flexor.core.errors import CheckpointError
from flexor.core.foreign_files import read_json
from flexor.core.log import log
from flexor.core.machine import flush_to_disk
from flexor.core.manifest import difference, hash_file
from flexor.core.paths import inside
from flexor.core.run_files import MANIFEST as MANIFEST
from flexor.core.run_files import TRAINING_STATE

LAST = "last"


def folder_name(step: int, total_steps: int) -> str:
    """As in LeRobot: at least six digits."""
    return f"{step:0{max(6, len(str(total_steps)))}d}"


class Folder:
    """A checkpoint that is being written: in a temporary folder, which is then renamed to the final one."""

    def __init__(self, checkpoints: Path, step: int, total_steps: int):
        self.step = step
        self.final = checkpoints / folder_name(step, total_steps)
        self.aside = checkpoints / f".{self.final.name}.writing"

    def open(self) -> None:
        with self.failures_named():
            shutil.rmtree(self.aside, ignore_errors=True)
            (self.aside / "training_state").mkdir(parents=True)

    def finish(self, hashes: Mapping[str, str] | None = None) -> None:
        """`hashes`: those that are already computed, by the file's name in the folder."""
        _write_manifest(self.aside, self.step, hashes or {})
        _replace_folder(self.aside, self.final)
        _point_last_at(self.final)

    @contextlib.contextmanager
    def failures_named(self) -> Iterator[None]:
        """Turn an error inside into a readable message, and remove the incomplete checkpoint."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            shutil.rmtree(self.aside, ignore_errors=True)
            raise _failed(self.final.parent, self.step, error) from error


def _failed(checkpoints: Path, step: int, error: Exception) -> CheckpointError:
    kept, full = newest(checkpoints), _no_room(error)
    free = ""
    with contextlib.suppress(OSError):
        free = f" ({shutil.disk_usage(checkpoints).free / 1e9:.2f} GB free)"
    cause = f"{full}{free}" if full else f"{error}"
    fix = "Free some disk space (--checkpoint.keep_last=2 keeps fewer checkpoints)" if full else "Fix that"
    return CheckpointError(
        f"Can't save the checkpoint of step {step} in {checkpoints}: {cause.rstrip('.')}. "
        + (f"The last good checkpoint is {kept}. " if kept else "There is no earlier checkpoint. ")
        + f"{fix} and continue with `flexor resume`."
    )


NO_ROOM = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}


def _no_room(error: Exception) -> str | None:
    """What has no room left; None for another error. Errors of other libraries or ranks have only a text."""
    text = str(error)
    for number, what in NO_ROOM.items():
        signs = (f"os error {number})", os.strerror(number))
        if getattr(error, "errno", None) == number or any(sign in text for sign in signs):
            return what
    return None


def _write_manifest(folder: Path, step: int, hashes: Mapping[str, str]) -> None:
    """List the checkpoint's files with sizes and hashes. All of them are flushed to disk before the manifest."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        files[name] = {"size": path.stat().st_size, "sha256": hashes.get(name) or hash_file(path)}
        flush_to_disk(path)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"format": 1, "step": step, "files": files}, indent=2))
    flush_to_disk(manifest)
    for subfolder in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        flush_to_disk(subfolder)


def read_state(folder: Path, name: str) -> Any:
    """A JSON file of a checkpoint's training state."""
    try:
        return read_json(inside(folder, f"{TRAINING_STATE}/{name}"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is damaged: {name} can't be read ({error}).") from error


def _replace_folder(source: Path, target: Path) -> None:
    """Rename over a folder that may exist: a run that resumes from an older step saves later steps again."""
    old = target.with_name(f".{target.name}.old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    source.rename(target)
    flush_to_disk(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _point_last_at(folder: Path) -> None:
    link = folder.parent / f".{LAST}.{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.rename(folder.parent / LAST)


def adopt(source: Path, target: Path) -> None:
    """Move a complete checkpoint from elsewhere on this file system to its place."""
    for path in (*source.rglob("*"), source):
        flush_to_disk(path)
    _replace_folder(source, target)
    _point_last_at(target)


def complete(checkpoints: Path) -> dict[int, Path]:
    """step -> folder of every finished checkpoint, oldest first."""
    found = {}
    for path in checkpoints.iterdir() if checkpoints.is_dir() else []:
        if path.name.isdigit() and (path / MANIFEST).is_file():
            found[int(path.name)] = path
    return dict(sorted(found.items()))


def newest(checkpoints: Path) -> Path | None:
    return next(reversed(complete(checkpoints).values()), None)


def verify(folder: Path) -> None:
    """Refuse a checkpoint whose files are not those that were saved."""
    if wrong := difference(folder):
        raise CheckpointError(f"{folder} is damaged: {wrong}. {_instead(folder)}")


def _instead(folder: Path) -> str:
    others = [p.name for p in complete(folder.parent).values() if p != folder]
    if not others:
        return "There is no other checkpoint."
    return f"Move it away, and `flexor resume` continues from {others[-1]}."


def sweep(checkpoints: Path) -> None:
    """Remove what an interrupted save left behind."""
    for path in checkpoints.glob(".*.writing"):
        log.info("removing the incomplete checkpoint %s", path.name)
        shutil.rmtree(path, ignore_errors=True)
    for pattern in (".*.old", ".*.downloading"):
        for path in checkpoints.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    for path in checkpoints.glob(f".{LAST}.*"):
        path.unlink()
    for path in checkpoints.glob("[0-9]*"):
        if not (path / MANIFEST).is_file():
            log.warning("%s has no manifest, so it is not a complete checkpoint: ignored", path)
    found = newest(checkpoints)
    if found is not None and (checkpoints / LAST).resolve() != found.resolve():
        _point_last_at(found)


def prune(checkpoints: Path, keep_last: int | None, keep_every: int | None) -> list[int]:
    """Delete checkpoints beyond the newest `keep_last`, but never multiples of `keep_every`."""
    if keep_last is None:
        return []
    folders = complete(checkpoints)
    removed = []
    for step, folder in list(folders.items())[:-keep_last]:
        if keep_every and step % keep_every == 0:
            continue
        # Renamed first: a kill while deleting must not leave a numbered folder with missing files.
        gone = folder.with_name(f".{folder.name}.old")
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        removed.append(step)
    return removed
