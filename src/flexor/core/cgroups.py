"""Limits of the control groups that this process is in: a container's, or those of `systemd-run` and SLURM.

The functions that read texts are pure. A limit may be set by any group on the way to the root; the tightest one counts.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def group_folders(text: str, controller: str, root: Path = ROOT) -> list[Path]:
    """/proc/self/cgroup -> the folders of a controller's group and of those above it, the innermost first."""
    group: tuple[Path, str] | None = None
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers and group is None:
            group = root, path  # version 2
        elif controller in controllers.split(","):
            group = root / controller, path  # version 1
    if group is None:
        return []
    top, path = group
    folders, inner = [], path.strip("/")
    while inner and ".." not in inner:
        folders.append(top / inner)
        inner = inner.rpartition("/")[0]
    return [*folders, top]


def read_cores(text: str) -> float | None:
    """cpu.max: how many cores may be used; None if all may."""
    match = re.fullmatch(r"(\d+) (\d+)\s*", text)
    return int(match[1]) / int(match[2]) if match and int(match[2]) else None


def read_throttled(text: str) -> float | None:
    """cpu.stat of a control group: seconds in which its processes had used up their share of the processors."""
    for pattern, scale in ((r"^throttled_usec (\d+)", 1e-6), (r"^throttled_time (\d+)", 1e-9)):
        if match := re.search(pattern, text, re.MULTILINE):
            return int(match[1]) * scale
    return None


def read_files(text: str) -> int:
    """memory.stat: bytes of files that can be dropped when memory is needed."""
    return sum(int(size) for size in re.findall(r"^(?:in)?active_file (\d+)$", text, re.MULTILINE))


def cores_limit() -> float | None:
    """Cores that the groups allow."""
    limits = []
    for folder in _folders("cpu"):
        quota, period = _text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us")
        limits.append(read_cores(_text(folder / "cpu.max") or f"{quota} {period}"))
    return min((cores for cores in limits if cores), default=None)


def throttled_s() -> float | None:
    """Seconds so far in which the limit kept this process's groups from running."""
    folders = _folders("cpu")
    times = [read_throttled(_text(folder / "cpu.stat")) for folder in folders]
    return max((seconds for seconds in times if seconds is not None), default=None)


def memory_limit(total: int) -> tuple[int, int] | None:
    """Bytes that the tightest group allows, and those it uses for other things than files; None without a limit."""
    tightest: tuple[int, int] | None = None
    for folder in _folders("memory"):
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
        if not (limit.strip().isdigit() and used.strip().isdigit()) or not 0 < int(limit) < total:
            continue
        without_files = max(int(used) - read_files(_text(folder / "memory.stat")), 0)
        if tightest is None or int(limit) - without_files < tightest[0] - tightest[1]:
            tightest = int(limit), without_files
    return tightest


def _folders(controller: str) -> list[Path]:
    return group_folders(_text(Path("/proc/self/cgroup")), controller)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
