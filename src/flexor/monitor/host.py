"""What the host of a run does: processors, memory, disks, network, and what waits for them.

Counters of Linux's /proc are read twice, and their differences are shares and rates. The functions that read texts are
pure, and ignore lines that they do not understand. A file that is not there (another system, a container) leaves its
figures out. macOS has the load average and this process's own share.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexor.core import cgroups

SECTOR = 512  # bytes, in /proc/diskstats, whatever the disk has
# Disks and networks made of others, whose bytes would count twice, or that are memory
NO_DISK = re.compile(r"(loop|ram|zram|dm-|md|sr|fd)\d")
NO_NETWORK = re.compile(r"(lo|ifb\d|docker|veth|br-|virbr|cni|flannel|cali|tun|tap|bond|dummy|vnet)")
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
PRESSURES = ("cpu", "io", "memory")


@dataclass(frozen=True)
class CoreTicks:
    """Time of one core, or of all of them, since the start of the machine."""

    busy: int
    total: int
    waiting: int  # idle, while something waits for a disk
    stolen: int  # taken by other machines of the same hypervisor

    def since(self, before: CoreTicks) -> tuple[float, float, float]:
        """Shares of the time: busy, waiting for a disk, stolen."""
        total = max(self.total - before.total, 1)
        shares = (
            (self.busy - before.busy) / total,
            (self.waiting - before.waiting) / total,
            (self.stolen - before.stolen) / total,
        )
        busy, waiting, stolen = (min(max(share, 0.0), 1.0) for share in shares)
        return busy, waiting, stolen


def read_cores(text: str) -> dict[str, CoreTicks]:
    """/proc/stat: `cpu` is all cores, `cpu0` the first one."""
    found = {}
    for line in text.splitlines():
        name, *words = line.split() or [""]
        if not re.fullmatch(r"cpu\d*", name) or len(words) < 4 or not all(word.isdigit() for word in words):
            continue
        ticks = [*map(int, words[:8]), *[0] * 8][:8]  # user nice system idle iowait irq softirq steal
        total, idle, stolen = sum(ticks), ticks[3] + ticks[4], ticks[7]
        found[name] = CoreTicks(total - idle - stolen, total, ticks[4], stolen)
    return found


def read_memory(text: str) -> dict[str, int]:
    """/proc/meminfo, in bytes."""
    pairs = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(count) * 1024 for name, count in pairs}


def read_disks(text: str, disks: Collection[str] | None = None) -> tuple[int, int]:
    """/proc/diskstats: bytes read and written since the start. `disks`: names of whole disks, without partitions."""
    read = written = 0
    for line in text.splitlines():
        words = line.split()
        if len(words) < 10 or NO_DISK.match(words[2]) or (disks is not None and words[2] not in disks):
            continue
        if words[5].isdigit() and words[9].isdigit():
            read, written = read + int(words[5]) * SECTOR, written + int(words[9]) * SECTOR
    return read, written


def read_network(text: str) -> tuple[int, int]:
    """/proc/net/dev: bytes received and sent since the start."""
    received = sent = 0
    for line in text.splitlines():
        name, colon, rest = line.strip().partition(":")
        words = rest.split()
        if not colon or NO_NETWORK.match(name) or len(words) < 9:
            continue
        if words[0].isdigit() and words[8].isdigit():
            received, sent = received + int(words[0]), sent + int(words[8])
    return received, sent


def read_pressure(text: str) -> dict[str, int]:
    """/proc/pressure/...: microseconds in which some or all work waited, since the start."""
    return {
        kind: int(total) for kind, total in re.findall(r"^(some|full) .*\btotal=(\d+)", text, re.MULTILINE)
    }


def read_core_wait(text: str) -> float | None:
    """/proc/PID/task/TID/schedstat: seconds in which a thread could have run, but had no core."""
    words = text.split()
    return int(words[1]) / 1e9 if len(words) >= 2 and words[1].isdigit() else None


def read_process(text: str) -> tuple[float, int] | None:
    """/proc/PID/stat: seconds on processors, and bytes of memory. The name in it may contain anything."""
    words = text.rpartition(")")[2].split()
    if len(words) < 22 or not all(re.fullmatch(r"-?\d+", words[i]) for i in (11, 12, 21)):
        return None
    return (int(words[11]) + int(words[12])) / TICKS, int(words[21]) * PAGE


@dataclass
class HostCounters:
    """All counters at one time."""

    time: float = field(default_factory=time.monotonic)
    cores: dict[str, CoreTicks] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
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
        figures: dict[str, Any] = {**_of_cores(self.cores, before.cores), **_of_memory(self.memory)}
        for names, now, then in (
            (("disk_read_mb_s", "disk_write_mb_s"), self.disks, before.disks),
            (("net_in_mb_s", "net_out_mb_s"), self.network, before.network),
        ):
            if now is not None and then is not None:
                # a disk or a network that was removed takes its count with it
                figures |= {
                    name: round(max(n - t, 0) / span / 1e6, 3) for name, n, t in zip(names, now, then)
                }
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

    def _share_of_cores(self, before: HostCounters, span: float, own: float | None) -> dict[str, float]:
        """How many cores the run may use, how many more its threads could use now, and how many others use."""
        figures: dict[str, float] = {}
        if self.usable:
            limit = len(self.usable) if self.cores_limit is None else min(self.cores_limit, len(self.usable))
            figures |= {"cpu_usable": round(limit, 3), "cpu_allowed": float(len(self.usable))}
        same = self.core_wait.keys() & before.core_wait.keys()
        if same:
            waited = sum(self.core_wait[thread] - before.core_wait[thread] for thread in same)
            figures["cpu_wait"] = round(max(waited, 0.0) / span, 3)
        names = [
            f"cpu{core}" for core in self.usable if f"cpu{core}" in self.cores.keys() & before.cores.keys()
        ]
        if names and own is not None:
            shares = [self.cores[name].since(before.cores[name]) for name in names]
            taken = sum(busy + stolen for busy, _, stolen in shares)
            figures["cpu_others"] = round(max(taken - own, 0.0), 3)
        if self.memory_limit is not None:
            limit_bytes, used = self.memory_limit
            figures |= {
                "ram_limit_gb": round(limit_bytes / 1e9, 3),
                "ram_limit_used_gb": round(used / 1e9, 3),
            }
        return figures


def _of_cores(now: dict[str, CoreTicks], before: dict[str, CoreTicks]) -> dict[str, Any]:
    shares = {name: ticks.since(before[name]) for name, ticks in now.items() if name in before}
    figures: dict[str, Any] = {}
    if "cpu" in shares:
        names = ("cpu", "cpu_io_wait", "cpu_stolen")
        figures |= {name: round(share, 4) for name, share in zip(names, shares.pop("cpu"))}
    if shares:
        figures["cpu_cores"] = [round(busy, 2) for busy, _, _ in shares.values()]
    return figures


def _of_memory(memory: dict[str, int]) -> dict[str, float]:
    figures = {}
    if "MemTotal" in memory and "MemAvailable" in memory:
        figures["ram_total_gb"] = round(memory["MemTotal"] / 1e9, 3)
        figures["ram_used_gb"] = round((memory["MemTotal"] - memory["MemAvailable"]) / 1e9, 3)
    if "SwapTotal" in memory and "SwapFree" in memory:
        figures["swap_used_gb"] = round((memory["SwapTotal"] - memory["SwapFree"]) / 1e9, 3)
    return figures


def _share(value: float) -> float:
    return round(min(max(value, 0.0), 1.0), 4)


def count(pids: Iterable[int]) -> HostCounters:
    """Read all counters of this machine, and those of the run's processes."""
    if not sys.platform.startswith("linux"):
        return _count_self()
    pressure = {kind: read_pressure(_text(f"/proc/pressure/{kind}")) for kind in PRESSURES}
    disks, network = _text("/proc/diskstats"), _text("/proc/net/dev")
    processes = {pid: read_process(_text(f"/proc/{pid}/stat")) for pid in pids}
    memory = read_memory(_text("/proc/meminfo"))
    return HostCounters(
        cores=read_cores(_text("/proc/stat")),
        memory=memory,
        disks=read_disks(disks, _names("/sys/block")) if disks else None,
        network=read_network(network) if network else None,
        pressure={kind: totals for kind, totals in pressure.items() if totals},
        quota=cgroups.throttled_s(),
        processes={pid: found for pid, found in processes.items() if found is not None},
        core_wait=_core_wait(processes),
        usable=_usable(pid for pid, found in processes.items() if found is not None),
        cores_limit=cgroups.cores_limit(),
        memory_limit=cgroups.memory_limit(memory.get("MemTotal", 0)),
    )


def _core_wait(pids: Iterable[int]) -> dict[tuple[int, int], float]:
    found = {}
    for pid in pids:
        for name in _names(f"/proc/{pid}/task") or ():
            waited = read_core_wait(_text(f"/proc/{pid}/task/{name}/schedstat"))
            if waited is not None:
                found[pid, int(name)] = waited
    return found


def _usable(pids: Iterable[int]) -> frozenset[int]:
    cores: set[int] = set()
    for pid in pids:
        with suppress(OSError):
            cores |= os.sched_getaffinity(pid)
    return frozenset(cores)


def _count_self() -> HostCounters:
    """What every Unix has: this process only, and its memory at its peak."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return HostCounters(processes={os.getpid(): (used.ru_utime + used.ru_stime, peak)})


class ThreadTime:
    """Of the thread that makes it: how much of the time it ran, and could have run but had no core."""

    def __init__(self) -> None:
        self.before = self._look()

    def take(self) -> dict[str, float]:
        """Shares of the time since the last call; only `ran` if the system does not count the waiting."""
        now, before = self._look(), self.before
        self.before = now
        span = max(now[0] - before[0], 1e-6)
        shares = {"ran": _share((now[1] - before[1]) / span)}
        if now[2] is not None and before[2] is not None:
            shares["waited"] = _share((now[2] - before[2]) / span)
        return shares

    def _look(self) -> tuple[float, float, float | None]:
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
