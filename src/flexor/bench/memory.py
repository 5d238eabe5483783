"""Peak memory of a whole process tree, sampled from /proc.

Worker processes share pages, so adding up what each has resident counts them more than once. The
proportional set size (PSS) gives every process its share of a page, and adds up. A sample walks page
tables and is not free: a few per second are enough, since buffers live for seconds.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

PROC = Path("/proc")
INTERVAL_S = 0.2


class PeakMemory:
    """A context that samples process `pid` and all its descendants; afterwards it holds their peaks in bytes."""

    def __init__(self, pid: int | None = None, interval: float = INTERVAL_S):
        self.pid = os.getpid() if pid is None else pid
        self.interval = interval
        self.pss = 0
        self.pss_without_files = 0  # less what is only mapped from files: the kernel may drop that
        self.rss = 0
        self._high_water: dict[int, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak-memory", daemon=True)

    @property
    def vm_hwm(self) -> int:
        """Every process's own high-water mark as the kernel kept it, added up: never less than the true peak."""
        return sum(self._high_water.values())

    def figures(self) -> dict[str, int]:
        return {
            "peak_memory_bytes": self.pss,
            "peak_memory_without_files_bytes": self.pss_without_files,
            "peak_rss_bytes": self.rss,
            "vm_hwm_bytes": self.vm_hwm,
        }

    def sample(self) -> int:
        """Look once; the tree's PSS now."""
        pss = files = rss = 0
        for pid in process_tree(self.pid):
            memory = _fields(PROC / str(pid) / "smaps_rollup")
            status = _fields(PROC / str(pid) / "status")
            resident = status.get("VmRSS", 0)
            pss += memory.get("Pss", resident)  # another user's process shows its status only
            files += memory.get("Pss_File", 0)
            rss += resident
            self._high_water[pid] = max(self._high_water.get(pid, 0), status.get("VmHWM", 0))
        self.pss = max(self.pss, pss)
        self.pss_without_files = max(self.pss_without_files, pss - files)
        self.rss = max(self.rss, rss)
        return pss

    def __enter__(self) -> PeakMemory:
        self.sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.sample()

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            self.sample()


def process_tree(pid: int) -> list[int]:
    """The process and all its descendants that are alive."""
    tree = [pid]
    for parent in tree:  # grows while it is walked
        for children in (PROC / str(parent) / "task").glob("*/children"):
            try:
                tree += map(int, children.read_text().split())
            except OSError:
                continue  # it ended meanwhile
    return tree


def _fields(path: Path) -> dict[str, int]:
    """The "Name: 123 kB" lines of a /proc file, in bytes; nothing if the process is gone."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {w[0].rstrip(":"): int(w[1]) * 1024 for w in words if len(w) == 3 and w[2] == "kB"}
