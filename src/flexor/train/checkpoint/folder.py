"""Checkpoints are complete or absent: written to a temporary folder, manifest last, then renamed.

A process may be killed at any time: a numbered folder with a manifest is always complete. The next run removes
temporary folders that are left over.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexor.core.disk_errors import disk_problem
from flexor.core.errors import CheckpointError
from flexor.core.foreign_files import MALFORMED, read_json
from flexor.core.log import log, warn_once
from flexor.core.machine import flush_to_disk
from flexor.core.manifest import EXPORTED, difference, hash_file
from flexor.core.paths import inside
from flexor.core.run_files import LAST, TRAINING_STATE, numbered_checkpoints
from flexor.core.run_files import MANIFEST as MANIFEST

MOST_STEPS = 10**15  # of a name that is still a number


def folder_name(step: int, total_steps: int) -> str:
    """As in LeRobot: at least six digits."""
    return f"{step:0{max(6, len(str(total_steps)))}d}"


class Folder:
    """A checkpoint that is being written: in a temporary folder, which is then renamed to the final one."""

    def __init__(self, checkpoints: Path, step: int, total_steps: int):
        self.step = step
        self.final = checkpoints / folder_name(step, total_steps)
        self.temporary = checkpoints / f".{self.final.name}.writing"

    def open(self) -> None:
        self.remove()
        self.final.parent.mkdir(exist_ok=True)  # fails if the run's folder is gone
        (self.temporary / "training_state").mkdir(parents=True)

    def remove(self) -> None:
        """Remove what was written so far."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    def finish(self, hashes: Mapping[str, str] | None = None) -> None:
        """`hashes`: those that are already computed, by the file's name in the folder."""
        _write_manifest(self.temporary, self.step, hashes or {})
        same_step = numbered_checkpoints(self.final.parent).get(self.step)
        _replace_folder(self.temporary, self.final)
        if same_step is not None and same_step != self.final:
            _remove(same_step)  # with fewer digits: the run was to have fewer steps then
        point_last_at(self.final)

    def make_room(self, keep_last: int | None, keep_every: int | None) -> list[int]:
        """Remove what `prune` would remove after this save, but not the newest complete checkpoint. Their steps."""
        earlier = complete(self.final.parent)
        steps = [step for step in earlier if step != self.step]
        surplus = _surplus([*steps, self.step], keep_last, keep_every)
        surplus = [step for step in surplus if step in steps[:-1]]
        for step in surplus:
            _remove(earlier[step])
        return surplus

    def failure(self, error: Exception) -> CheckpointError:
        """A readable message for an error while writing."""
        checkpoints = self.final.parent
        previous, problem = None, disk_problem(error, checkpoints)
        with contextlib.suppress(OSError):  # if the folder can't be read either
            previous = newest(checkpoints)
        cause, fix = f"{error}".rstrip("."), "Fix that"
        if problem and problem.full:
            cause, fix = problem.cause, f"{problem.fix} (--checkpoint.keep_last=2 keeps fewer checkpoints)"
            with contextlib.suppress(OSError):
                cause += f" ({shutil.disk_usage(checkpoints).free / 1e9:.2f} GB free)"
        elif problem:
            cause, fix = f"{problem.cause} ({cause})", problem.fix
        last = f"The last good checkpoint is {previous}" if previous else "There is no earlier checkpoint"
        nothing = problem and problem.full and previous is None
        again = "start the run again" if nothing else "continue with `flexor resume`"
        return CheckpointError(
            f"Can't save the checkpoint of step {self.step} in {checkpoints}: {cause}. {last}. "
            f"{fix} and {again}."
        )


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


def add_exported(folder: Path, name: str, path: Path) -> None:
    """Add a file to the manifest that will be in the checkpoint as `name`, and is now at `path`."""
    manifest, temporary = folder / MANIFEST, folder / TRAINING_STATE / ".manifest.writing"
    content = read_json(manifest)
    content.setdefault(EXPORTED, {})[name] = {"size": path.stat().st_size, "sha256": hash_file(path)}
    temporary.unlink(missing_ok=True)  # a link, perhaps: the checkpoint may be a stranger's
    temporary.write_text(json.dumps(content, indent=2))
    flush_to_disk(temporary)
    temporary.rename(manifest)


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


def point_last_at(folder: Path) -> None:
    """Make `last` a link to a checkpoint. Nothing depends on it: without links, the newest number counts."""
    last = folder.parent / LAST
    link = folder.parent / f".{LAST}.{os.getpid()}"
    try:
        if last.is_dir() and not last.is_symlink():
            _move_away(last)
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.rename(last)
    except OSError as error:
        with contextlib.suppress(OSError):
            link.unlink(missing_ok=True)
            last.unlink(missing_ok=True)  # it would name an older one
        warning = "%s is not a link to the newest checkpoint: %s. Flexor finds it by its number"
        warn_once(warning, last, error.strerror)


def _move_away(last: Path) -> None:
    """Free the name `last`, which is a folder: a copy of the run followed the link. No checkpoint is lost."""
    step, earlier = _step_of(last), complete(last.parent)
    if step is not None and step not in earlier:
        target = numbered_checkpoints(last.parent).get(step) or last.with_name(folder_name(step, step))
        log.info("%s is a folder, not a link: renamed to %s", last, target.name)
        _replace_folder(last, target)
    elif step is not None and (last / MANIFEST).read_bytes() == (earlier[step] / MANIFEST).read_bytes():
        log.info("%s is a copy of %s, not a link to it: replaced by a link", last, earlier[step].name)
        _remove(last)
    else:
        target = next(t for n in itertools.count(1) if not (t := last.with_name(f"{LAST}.copy-{n}")).exists())
        warning = "%s is a folder, not a link, and not a copy of a checkpoint here: renamed to %s"
        log.warning(warning, last, target.name)
        last.rename(target)


def _step_of(folder: Path) -> int | None:
    """The step of a complete checkpoint."""
    try:
        step = read_json(folder / MANIFEST)["step"]
    except (OSError, *MALFORMED):
        return None
    return step if isinstance(step, int) and 0 <= step < MOST_STEPS else None


def adopt(source: Path, target: Path) -> None:
    """Move a complete checkpoint from elsewhere on this file system to its place."""
    for path in (*source.rglob("*"), source):
        flush_to_disk(path)
    _replace_folder(source, target)
    point_last_at(target)


def complete(checkpoints: Path) -> dict[int, Path]:
    """step -> folder of every finished checkpoint, oldest first."""
    numbered = numbered_checkpoints(checkpoints)
    return {step: folder for step, folder in numbered.items() if (folder / MANIFEST).is_file()}


def newest(checkpoints: Path) -> Path | None:
    return next(reversed(complete(checkpoints).values()), None)


def verify(folder: Path) -> None:
    """Refuse a checkpoint whose files are not those that were saved."""
    if wrong := difference(folder):
        usable = [p.name for p in complete(folder.parent).values() if p != folder]
        fix = f"Move it away, and `flexor resume` continues from {usable[-1]}." if usable else ""
        raise CheckpointError(f"{folder} is damaged: {wrong}. {fix or 'There is no other checkpoint.'}")


def sweep(checkpoints: Path) -> None:
    """Remove what an interrupted save left behind."""
    for suffix in ("writing", "old", "downloading"):
        for path in checkpoints.glob(f".*.{suffix}"):
            if suffix == "writing":
                log.info("removing the incomplete checkpoint %s", path.name)
            shutil.rmtree(path, ignore_errors=True)
    for path in checkpoints.glob(f".{LAST}.*"):
        path.unlink()
    for path in checkpoints.glob("[0-9]*"):
        if not (path / MANIFEST).is_file():
            log.warning("%s has no manifest, so it is not a complete checkpoint: ignored", path)
    last = checkpoints / LAST
    if last.is_dir() and not last.is_symlink():
        _move_away(last)
    folder = newest(checkpoints)
    if folder is not None and last.resolve() != folder.resolve():
        point_last_at(folder)


def prune(checkpoints: Path, keep_last: int | None, keep_every: int | None) -> list[int]:
    """Delete checkpoints beyond the newest `keep_last`, but never multiples of `keep_every`. Their steps."""
    folders = complete(checkpoints)
    removed = _surplus([*folders], keep_last, keep_every)
    for step in removed:
        _remove(folders[step])
    return removed


def _surplus(steps: Sequence[int], keep_last: int | None, keep_every: int | None) -> list[int]:
    older = sorted(steps)[:-keep_last] if keep_last else []
    return [step for step in older if not (keep_every and step % keep_every == 0)]


def _remove(folder: Path) -> None:
    # Renamed first: a kill while deleting must not leave a numbered folder with missing files.
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    shutil.rmtree(old, ignore_errors=True)
