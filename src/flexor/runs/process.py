"""Whether the process that writes a run still exists, without touching the run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil

from flexor.core.run_files import LOCK

SLACK_S = 5.0


def is_alive(folder: Path) -> bool | None:
    """None if that is unknown: the run is on another host, or its folder has no lock."""
    lock = folder / LOCK
    try:
        match = re.fullmatch(r"pid (\d+) on (\S+)", lock.read_text().strip())
        locked_at = lock.stat().st_mtime
    except (OSError, ValueError):
        return None
    if match is None or match[2] != os.uname().nodename:
        return None
    return _runs(int(match[1]), locked_at)


def _runs(pid: int, locked_at: float) -> bool:
    """Whether the process that took the lock at that time still runs: a later one may have its number."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass  # it is somebody else's
    except (ProcessLookupError, OverflowError):
        return False
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= locked_at + SLACK_S
    except psutil.Error:
        return True  # the system hides processes of others
