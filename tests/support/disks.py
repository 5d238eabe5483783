"""Small disks, which a test can fill, where the machine lets us mount them."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def leave_free(disk: Path, count: int) -> None:
    """Fill a disk up to so many bytes."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    filler.write_bytes(bytes(max(0, shutil.disk_usage(disk).free - count)))
