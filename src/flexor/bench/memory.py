"""Peak memory of a whole process tree, sampled from /proc.

Worker processes share pages, so the sum of their resident memory counts shared pages several times. The
proportional set size (PSS) gives every process its share of a page, so it can be summed. But it misses batches in
shared memory that wait in a queue and are not mapped, or that are mapped and not yet accessed. So shared memory is
counted by its files, each once. A sample walks page tables, which takes time, so sampling is limited to a hundredth
of the time; the kernel's own high-water marks cover the time in between.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

PROC = Path("/proc")
INTERVAL_S = 0.2
SHARED = ("/dev/shm/", "/memfd:", "/dev/zero (deleted)")  # noqa: S108  (names in /proc/PID/smaps)


class PeakMemory:
    """A context that samples process `pid` and all its descendants; afterwards it has their peaks in bytes."""

    def __init__(self, pid: int | None = None, interval: float = INTERVAL_S):
        self.pid = os.getpid() if pid is None else pid
        self.interval = interval
        self.total = 0
        self.without_files = 0  # without memory only mapped from files on disk: the kernel may drop it
        self.rss = 0
        self._high_water: dict[int, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak-memory", daemon=True)

    @property
    def vm_hwm(self) -> int:
        """The sum of the kernel's high-water marks of all processes; shared pages count in each process."""
        return sum(self._high_water.values())

    def figures(self) -> dict[str, int]:
        return {
            "peak_memory_bytes": self.total,
            "peak_memory_without_files_bytes": self.without_files,
            "peak_rss_bytes": self.rss,
            "vm_hwm_bytes": self.vm_hwm,
        }

    def sample(self) -> int:
        """Take one sample; returns the tree's current memory."""
        private = files = rss = 0
        shared: dict[tuple[int, int], int] = {}
        for pid in process_tree(self.pid):
            memory = _fields(PROC / str(pid) / "smaps_rollup")
            status = _fields(PROC / str(pid) / "status")
            resident = status.get("VmRSS", 0)
            private += memory.get("Pss", resident) - memory.get("Pss_Shmem", 0)
            files += memory.get("Pss_File", 0)
            rss += resident
            shared |= shared_memory(pid)
            self._high_water[pid] = max(self._high_water.get(pid, 0), status.get("VmHWM", 0))
        total = private + sum(shared.values())
        self.total = max(self.total, total)
        self.without_files = max(self.without_files, total - files)
        self.rss = max(self.rss, rss)
        return total

    def __enter__(self) -> PeakMemory:
        self.sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.sample()

    def _run(self) -> None:
        took = 0.0
        while not self._stop.wait(max(self.interval, 100 * took)):
            started = time.perf_counter()
            self.sample()
            took = time.perf_counter() - started


def shared_memory(pid: int) -> dict[tuple[int, int], int]:
    """Files in shared memory that a process has open or mapped: {(device, inode): bytes they take}."""
    folder, sizes = PROC / str(pid), {}
    try:
        descriptors = list((folder / "fd").iterdir())
        maps = (folder / "maps").read_text().splitlines()
    except OSError:
        return {}  # it has ended, or belongs to another user
    for descriptor in descriptors:
        try:
            if str(descriptor.readlink()).startswith(SHARED):
                status = descriptor.stat()
                sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
        except OSError:
            continue  # closed in the meantime
    for line in maps:
        area, _, _, device, inode, *name = line.split(maxsplit=5)
        if not name or not name[0].startswith(SHARED):
            continue
        major, minor = (int(part, 16) for part in device.split(":"))
        key = (os.makedev(major, minor), int(inode))
        if key not in sizes:
            sizes[key] = _mapped_bytes(folder / "map_files" / area)
    return sizes


def _mapped_bytes(area: Path) -> int:
    try:
        return area.stat().st_blocks * 512
    except OSError:  # only root may read it; for others all mapped memory counts
        start, end = (int(part, 16) for part in area.name.split("-"))
        return end - start


def process_tree(pid: int) -> list[int]:
    """The process and all its descendants that are alive."""
    tree = [pid]
    for parent in tree:  # grows while it is walked
        for children in (PROC / str(parent) / "task").glob("*/children"):
            try:
                tree += map(int, children.read_text().split())
            except OSError:
                continue  # it has ended
    return tree


def _fields(path: Path) -> dict[str, int]:
    """The "Name: 123 kB" lines of a /proc file, in bytes; nothing if the process is gone."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {w[0].rstrip(":"): int(w[1]) * 1024 for w in words if len(w) == 3 and w[2] == "kB"}
