"""New folders that appear when they are complete, and not before."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from flexor.core.errors import ConfigError, DatasetError
from flexor.core.log import log
from flexor.core.output_paths import check_output_folder
from flexor.data.format.dataset_files import check_new_folder


def check_targets(outs: Sequence[Path], roots: Sequence[Path]) -> None:
    """Raise an error if a target exists, or is inside a source or around it."""
    for out in outs:
        check_output_folder(out, "OUT")
        target = Path(os.path.realpath(out))
        for root in roots:
            source = Path(os.path.realpath(root))
            if source == target or source in target.parents or target in source.parents:
                raise ConfigError(
                    f"{out} and {root}: one folder is inside the other. Choose an output folder elsewhere."
                )
        check_new_folder(out)


@contextmanager
def new_folders(outs: Sequence[Path]) -> Iterator[list[Path]]:
    """Other folders to write to, beside `outs`. At the end they get these names; after an error they are deleted.

    A killed process leaves `.NAME.HOST.PID.incomplete`, which the next one on the same machine deletes.
    """
    parents = [out.parent for out in outs if not out.parent.exists()]
    aside = [out.with_name(f".{out.name}.{_host()}.{os.getpid()}.incomplete") for out in outs]
    try:
        for out in outs:
            out.parent.mkdir(parents=True, exist_ok=True)
            _remove_left(out)
        yield aside
        for out, folder in zip(outs, aside):
            _publish(folder, out)
    finally:
        for folder in aside:
            shutil.rmtree(folder, ignore_errors=True)
        for parent in parents:
            with suppress(OSError):  # it is in use
                parent.rmdir()


def _publish(folder: Path, out: Path) -> None:
    try:
        folder.rename(out)  # replaces an empty folder, and no other
    except OSError as error:
        raise DatasetError(f"{out} appeared meanwhile ({error.strerror}). Choose another folder.") from error


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()) or "host"


def _remove_left(out: Path) -> None:
    """Delete what processes that no longer run left of the same folder."""
    pattern = re.compile(re.escape(f".{out.name}.{_host()}.") + r"([0-9]+)\.incomplete")
    for path in out.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if match and not _runs(int(match[1])) and not path.is_symlink():
            log.info("deleting %s, which an interrupted command left", path)
            shutil.rmtree(path, ignore_errors=True)


def _runs(process: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(process, 0)
        except (ProcessLookupError, OverflowError):
            return False
    return True
