"""Load of a run's host: processors, memory, disks, network, and time spent waiting for them.

Differences of counters give shares and rates. Counters that a system lacks or a container hides are left out. psutil
reads what every system has; pressure and the time that threads wait for a core are Linux's.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil

from flexor.core import cgroups

# Disks and networks made of others, whose bytes would count twice, or that are memory
NO_DISK = re.compile(r"(loop|ram|zram|dm-|md|sr|fd)\d")
NO_NETWORK = re.compile(r"(lo|ifb\d|docker|veth|br-|virbr|cni|flannel|cali|tun|tap|bond|dummy|vnet)")
T = TypeVar("T")
PRESSURES = ("cpu", "io", "memory")


def read_cores() -> np.ndarray:
    """Seconds of each core since the start: busy, idle while something waits for a disk, stolen by other virtual
    machines, and all. [C, 4]
    """
    rows = []
    for times in psutil.cpu_times(percpu=True):
        waiting, stolen = getattr(times, "iowait", 0.0), getattr(times, "steal", 0.0)
        total = sum(times[:8])  # what follows, the time of guests, is in `user` already
        rows.append((total - times.idle - waiting - stolen, waiting, stolen, total))
    return np.array(rows)


def read_memory() -> tuple[int, int, int]:
    """Bytes of memory, those available, and those swapped to disk."""
    memory = psutil.virtual_memory()
    return memory.total, memory.available, psutil.swap_memory().used


def read_disks() -> tuple[int, int] | None:
    """Bytes read and written since the start, by whole disks."""
    disks = psutil.disk_io_counters(perdisk=True, nowrap=False)
    return _total(disks, NO_DISK, ("read_bytes", "write_bytes"), _names("/sys/block"))


def read_network() -> tuple[int, int] | None:
    """Bytes received and sent since the start."""
    return _total(psutil.net_io_counters(pernic=True, nowrap=False), NO_NETWORK, ("bytes_recv", "bytes_sent"))


def _total(
    counters: Mapping[str, Any],
    ignored: re.Pattern,
    fields: tuple[str, str],
    names: Collection[str] | None = None,
) -> tuple[int, int] | None:
    if not counters:
        return None
    names = counters.keys() if names is None else names
    counted = [device for name, device in counters.items() if not ignored.match(name) and name in names]
    first, second = (sum(getattr(device, field) for device in counted) for field in fields)
    return first, second


def read_process(pid: int) -> tuple[float, int]:
    """Seconds on processors, and bytes of memory."""
    process = psutil.Process(pid)
    with process.oneshot():
        times = process.cpu_times()
        return times.user + times.system, process.memory_info().rss


def read_pressure(text: str) -> dict[str, int]:
    """/proc/pressure/...: microseconds in which some or all work waited, since the start."""
    totals = re.findall(r"^(some|full) .*\btotal=(\d+)", text, re.MULTILINE)
    return {kind: int(total) for kind, total in totals}


def read_core_wait(text: str) -> float | None:
    """/proc/PID/task/TID/schedstat: seconds in which a thread could have run, but had no core."""
    words = text.split()
    return int(words[1]) / 1e9 if len(words) >= 2 and words[1].isdigit() else None


@dataclass
class HostCounters:
    """All counters at one time."""

    time: float = field(default_factory=time.monotonic)
    cores: np.ndarray | None = None  # [C, 4], as of `read_cores`
    memory: tuple[int, int, int] | None = None  # all, available, swapped
    disks: tuple[int, int] | None = None
    network: tuple[int, int] | None = None
    pressure: dict[str, dict[str, int]] = field(default_factory=dict)
    quota: float | None = None
    processes: dict[int, tuple[float, int]] = field(default_factory=dict)  # of the run
    core_wait: dict[tuple[int, int], float] = field(default_factory=dict)  # of the run's threads
    usable: frozenset[int] = frozenset()  # cores that the run's processes may use
    cores_limit: float | None = None  # how many of them at a time
    memory_limit: tuple[int, int] | None = None

    def since(self, before: HostCounters) -> dict[str, Any]:
        """Figures of the time between two readings: what is in a line of `system.jsonl`."""
        span = max(self.time - before.time, 1e-6)
        figures: dict[str, Any] = {}
        seconds = self._core_seconds(before)
        if seconds is not None:
            shares = _core_shares(seconds.sum(0)).round(4).tolist()
            figures |= dict(zip(("cpu", "cpu_io_wait", "cpu_stolen"), shares))
            figures["cpu_cores"] = _core_shares(seconds)[:, 0].round(2).tolist()
        figures |= _of_memory(self.memory)
        for names, now, then in (
            (("disk_read_mb_s", "disk_write_mb_s"), self.disks, before.disks),
            (("net_in_mb_s", "net_out_mb_s"), self.network, before.network),
        ):
            # a disk or a network that was removed takes its count with it
            for name, new, old in zip(names, now or (), then or ()):
                figures[name] = round(max(new - old, 0) / span / 1e6, 3)
        for kind, totals in self.pressure.items():
            for which, total in totals.items():
                if which in before.pressure.get(kind, {}):
                    name = f"pressure_{kind}" + ("_full" if which == "full" else "")
                    figures[name] = _share((total - before.pressure[kind][which]) / 1e6 / span)
        if self.quota is not None and before.quota is not None:
            figures["cpu_throttled"] = _share((self.quota - before.quota) / span)
        same = self.processes.keys() & before.processes.keys()
        if same:
            used = sum(self.processes[pid][0] - before.processes[pid][0] for pid in same)
            figures["cpu_own"] = round(max(used, 0.0) / span, 3)
            figures["ram_own_gb"] = round(sum(size for _, size in self.processes.values()) / 1e9, 3)
        return figures | self._share_of_cores(before, span, figures.get("cpu_own"))

    def _core_seconds(self, before: HostCounters) -> np.ndarray | None:
        if self.cores is None or before.cores is None or not 0 < self.cores.size == before.cores.size:
            return None  # a core was switched on or off
        return self.cores - before.cores

    def _share_of_cores(self, before: HostCounters, span: float, run_cores: float | None) -> dict[str, float]:
        """How many cores the run may use, how many more its threads could use now, and how many others use."""
        figures: dict[str, float] = {}
        if self.usable:
            limit = len(self.usable) if self.cores_limit is None else min(self.cores_limit, len(self.usable))
            figures |= {"cpu_usable": round(limit, 3), "cpu_allowed": float(len(self.usable))}
        same = self.core_wait.keys() & before.core_wait.keys()
        if same:
            waited = sum(self.core_wait[thread] - before.core_wait[thread] for thread in same)
            figures["cpu_wait"] = round(max(waited, 0.0) / span, 3)
        seconds = self._core_seconds(before)
        if seconds is not None and self.usable and run_cores is not None:
            # without some cores that are off, their numbers are not their positions
            cores = range(len(seconds)) if len(self.usable) >= len(seconds) else sorted(self.usable)
            shares = _core_shares(seconds[[core for core in cores if core < len(seconds)]])
            figures["cpu_others"] = round(max(float(shares[:, [0, 2]].sum()) - run_cores, 0.0), 3)
        if self.memory_limit is not None:
            limit_bytes, used = self.memory_limit
            figures |= {
                "ram_limit_gb": round(limit_bytes / 1e9, 3),
                "ram_limit_used_gb": round(used / 1e9, 3),
            }
        return figures


def _core_shares(seconds: np.ndarray) -> np.ndarray:
    """[..., 4] -> shares of the time [..., 3]: busy, waiting for a disk, stolen."""
    return np.clip(seconds[..., :3] / np.maximum(seconds[..., 3:], 0.01), 0, 1)


def _of_memory(memory: tuple[int, int, int] | None) -> dict[str, float]:
    if memory is None:
        return {}
    total, available, swapped = (size / 1e9 for size in memory)
    return {
        "ram_total_gb": round(total, 3),
        "ram_used_gb": round(total - available, 3),
        "swap_used_gb": round(swapped, 3),
    }


def _share(value: float) -> float:
    return round(min(max(value, 0.0), 1.0), 4)


def count(pids: Collection[int]) -> HostCounters:
    """Read all counters of this machine, and those of the run's processes."""
    pressure = {kind: read_pressure(_text(f"/proc/pressure/{kind}")) for kind in PRESSURES}
    processes = {pid: _try(read_process, pid) for pid in pids}
    memory = _try(read_memory)
    return HostCounters(
        cores=_try(read_cores),
        memory=memory,
        disks=_try(read_disks),
        network=_try(read_network),
        pressure={kind: totals for kind, totals in pressure.items() if totals},
        quota=cgroups.throttled_s(),
        processes={pid: used for pid, used in processes.items() if used is not None},
        core_wait=_core_wait(pids),
        usable=_usable(pid for pid, used in processes.items() if used is not None),
        cores_limit=cgroups.cores_limit(),
        memory_limit=cgroups.memory_limit(memory[0] if memory else 0),
    )


def _try(read: Callable[..., T], *arguments: Any) -> T | None:
    """None if it can't be read: psutil raises many types of errors where /proc is hidden, partial or damaged."""
    try:
        return read(*arguments)
    except Exception:
        return None


def _core_wait(pids: Iterable[int]) -> dict[tuple[int, int], float]:
    waits = {}
    for pid in pids:
        for name in _names(f"/proc/{pid}/task") or ():
            waited = read_core_wait(_text(f"/proc/{pid}/task/{name}/schedstat"))
            if waited is not None:
                waits[pid, int(name)] = waited
    return waits


def _usable(pids: Iterable[int]) -> frozenset[int]:
    cores: set[int] = set()
    for pid in pids:
        with suppress(OSError, AttributeError):  # macOS has no such call
            cores |= os.sched_getaffinity(pid)
    return frozenset(cores)


class ThreadTime:
    """How much of the time the thread that creates it ran, or could have run but had no core."""

    def __init__(self) -> None:
        self.before = self._read()

    def take(self) -> dict[str, float]:
        """Shares of the time since the last call; only `ran` if the system does not count the waiting."""
        now, before = self._read(), self.before
        self.before = now
        span = max(now[0] - before[0], 1e-6)
        shares = {"ran": _share((now[1] - before[1]) / span)}
        if now[2] is not None and before[2] is not None:
            shares["waited"] = _share((now[2] - before[2]) / span)
        return shares

    def _read(self) -> tuple[float, float, float | None]:
        return time.perf_counter(), time.thread_time(), read_core_wait(_text("/proc/thread-self/schedstat"))


def mean_shares(ranks: list[dict[str, float]]) -> dict[str, float]:
    """Shares of several threads as one."""
    names = [name for name in ranks[0] if all(name in shares for shares in ranks)]
    return {name: round(sum(shares[name] for shares in ranks) / len(ranks), 4) for name in names}


def load_average() -> dict[str, float]:
    try:
        return {"load": round(os.getloadavg()[0], 2)}
    except OSError:
        return {}


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _names(folder: str) -> set[str] | None:
    try:
        return {path.name for path in Path(folder).iterdir()}
    except OSError:
        return None
