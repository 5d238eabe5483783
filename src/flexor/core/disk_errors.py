"""Why a file can't be written, and what the user can do about it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

LEAST_FREE = 1 << 16  # bytes: a disk with less is full
FREE_SPACE = "Free some disk space"
WRITABLE = "Make it writable for the user of the run"
SERVER = "the file server can't be reached", "Check the network and the mount"
DEVICE = "the disk can't be read or written", "Check the disk (`dmesg` has the kernel's messages)"


@dataclass(frozen=True)
class DiskProblem:
    cause: str
    fix: str
    full: bool = False


def _described(full: bool, **texts: tuple[str, str]) -> dict[int, DiskProblem]:
    """By error number, of those that this system has."""
    return {
        getattr(errno, n): DiskProblem(*text, full=full) for n, text in texts.items() if hasattr(errno, n)
    }


PROBLEMS = {
    **_described(
        True,
        ENOSPC=("the disk is full", FREE_SPACE),
        EDQUOT=("the disk quota is used up", FREE_SPACE),
    ),
    **_described(
        False,
        EROFS=(
            "the file system is read-only",
            "Mount it writable (after errors of the disk, Linux makes it read-only: see `dmesg`)",
        ),
        EACCES=("permission denied", WRITABLE),
        EPERM=("permission denied", WRITABLE),
        EIO=DEVICE,
        ENXIO=DEVICE,
        ENODEV=DEVICE,
        EFBIG=(
            "the file is larger than allowed",
            "Raise the limit (`ulimit -f`), or use a file system for larger files",
        ),
        EMFILE=("too many files are open", "Raise the limit (`ulimit -n`)"),
        ENFILE=("too many files are open on this machine", "Close other programs"),
        ESTALE=SERVER,
        ETIMEDOUT=SERVER,
        ENOTCONN=SERVER,
        EHOSTDOWN=SERVER,
        EHOSTUNREACH=SERVER,
    ),
}
GONE = DiskProblem(
    "the folder is gone", "Put it back (it was moved or deleted, or its disk is not mounted any more)"
)


def disk_problem(error: Exception, folder: Path) -> DiskProblem | None:
    """What is wrong where `folder` is; None if the error does not say. Those of libraries and other ranks are texts."""
    number = getattr(error, "errno", None) or _number_in(str(error))
    if number in PROBLEMS:
        return PROBLEMS[number]
    if number in (errno.ENOENT, errno.ENOTDIR) and not folder.is_dir():
        return GONE
    # torch says something about positions in a file
    with contextlib.suppress(OSError):
        return PROBLEMS[errno.ENOSPC] if shutil.disk_usage(folder).free < LEAST_FREE else None
    return None


def _number_in(text: str) -> int | None:
    """The error's number, from the text of another program or language."""
    for number in (*PROBLEMS, errno.ENOENT, errno.ENOTDIR):
        if f"os error {number})" in text or os.strerror(number) in text:
            return number
    return None
