"""Where a command writes: checked before its work starts, and a file is replaced only by a complete one."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flexor.core.errors import ConfigError


def check_output_file(path: Path, flag: str) -> Path:
    """The path, if a file can be written there. `flag` is what the user gave it with, such as --output."""
    mode = _mode(path, flag)
    if mode is not None and stat.S_ISDIR(mode):
        raise ConfigError(f"{flag}={path} is a folder: name a file, such as {path / 'NAME'}.")
    return _check(path, flag, "another file")


def check_output_folder(path: Path, flag: str) -> Path:
    """The path, if it is a folder that can be written to, or if one can be created there."""
    mode = _mode(path, flag)
    if mode is not None and not stat.S_ISDIR(mode):
        raise ConfigError(f"{flag}={path} is a file, but must be a folder: choose another one.")
    return _check(path, flag, "another folder")


def make_parents(path: Path) -> Path:
    """Create the folder of an output file, if it does not exist yet. Returns the file's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Inside, another path to write to. At the end it replaces the file: a reader finds all of it or the one before."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    try:
        yield aside
        aside.replace(path)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def _check(path: Path, flag: str, other: str) -> Path:
    """Check the path itself if it exists, else the nearest folder above it, in which the rest will be created."""
    place = _nearest(path, flag)
    if place.is_symlink() and not place.exists():
        raise ConfigError(
            f"{flag}={path}: {place} is a link to {place.readlink()}, which does not exist: choose {other}."
        )
    if place != path and not place.is_dir():
        raise ConfigError(f"{flag}={path}: {place} is a file, not a folder: choose {other}.")
    needed = os.W_OK | (os.X_OK if place.is_dir() else 0)
    if not os.access(place, needed, effective_ids=os.access in os.supports_effective_ids):
        raise ConfigError(f"{flag}={path}: {_why_not(place)}: choose {other}.")
    return path


def _nearest(path: Path, flag: str) -> Path:
    """The path, or the first of the folders above that exists, whatever it is: also a link to nothing."""
    return next(at for at in (path, *path.parents) if _mode(at, flag) is not None or at.is_symlink())


def _mode(path: Path, flag: str) -> int | None:
    """The kind of file that is there; None if there is none."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # no permission, too long, links in a circle; a null character
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{flag}={path} can't be used ({reason}): choose another path.") from None


def _why_not(place: Path) -> str:
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        return f"{place} is on a read-only file system"
    return f"you have no permission to write to {place}"
