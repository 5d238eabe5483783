"""Whether a run gets the cores that it could use, and if not, why.

If the run's threads wait for cores although the run uses fewer than it may, other processes use them. Without these it
would use all cores that its threads ask for, up to those it may use.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexor.core.findings import Finding, Fix
from flexor.runs.diagnosis.figures import Figures
from flexor.runs.diagnosis.verdict import faster, percent

MIN_THROTTLED = 0.1  # share of the time: less is noise
MIN_STOPPED = 0.3


@dataclass(frozen=True)
class Cores:
    used: float
    """Cores in use by the run."""
    waiting: float
    """Threads that have no core, on average."""
    allowed: float
    usable: float
    """Less than `allowed` if a container limits the time on them."""
    used_by_others: float

    @property
    def lost(self) -> float:
        """Share of the possible work that was not done."""
        could = min(self.used + self.waiting, self.allowed)
        return max(0.0, 1 - self.used / could) if could > 0 else 0.0

    @property
    def idle(self) -> float:
        """Unused cores."""
        return max(0.0, min(self.allowed - self.used_by_others, self.usable) - self.used)


def cores_of(f: Figures) -> Cores | None:
    used, allowed = f.get("system.cpu_own"), f.get("system.cpu_allowed")
    if used is None or not allowed or allowed <= 0 or used < 0:
        return None
    waiting = f.get("system.cpu_wait")
    if waiting is None:  # a system that does not count it per thread
        waiting = f.of("system.pressure_cpu")
    usable = f.of("system.cpu_usable", allowed)
    return Cores(used, max(waiting, 0.0), allowed, usable, max(f.of("system.cpu_others"), 0.0))


def starved(f: Figures, needs_cores: float) -> list[Finding]:
    """`needs_cores`: share of the time in which a step waits for work that needs cores."""
    cores = cores_of(f)
    if cores is None:
        return []
    figures = [
        ("cores in use by the run", f"{cores.used:.1f} of {cores.usable:.4g}"),
        ("its threads that wait for a core", f"{cores.waiting:.1f}"),
        ("cores in use by others", f"{cores.used_by_others:.1f}"),
    ]
    cost = min(cores.lost, needs_cores)
    throttled = f.of("system.cpu_throttled")
    limited = cores.usable < cores.allowed and throttled >= MIN_THROTTLED
    if limited:
        return [_by_limit(cores, throttled, cost, figures)]
    stopped_share = _stopped_share(f, cores)
    if stopped_share:
        return [_stopped_finding(cores, stopped_share, figures)]
    lacking = min(cores.used + cores.waiting, cores.allowed) - cores.used
    if cores.used_by_others < 0.5 * lacking:
        return []
    stolen = f.of("system.cpu_stolen")
    if stolen >= 0.02:
        figures.append(("taken by other virtual machines", percent(stolen)))
    evidence = (
        f"other processes use {cores.used_by_others:.1f} of {cores.allowed:.4g} cores, and {cores.waiting:.1f} of its "
        f"threads wait for one on average: it gets {percent(1 - cores.lost)} of the computing that it could use"
    )
    fixes = [Fix("stop the other processes, or give the run cores of its own", None, faster(1 - cost))]
    return [Finding("starved by neighbours", evidence, fixes, cost=cost, figures=figures, is_cause=True)]


def _by_limit(cores: Cores, throttled: float, cost: float, figures: list[tuple[str, str]]) -> Finding:
    return Finding(
        "starved by its CPU limit",
        f"the container or job may use {cores.usable:.3g} of {cores.allowed:.4g} cores, had used them up "
        f"{percent(throttled)} of the time, and {cores.waiting:.1f} of the run's threads wait for one on average",
        [Fix("give the container or job more cores", None, faster(1 - cost))],
        cost=cost,
        figures=[*figures, ("limit reached", percent(throttled))],
        is_cause=True,
    )


def _stopped_share(f: Figures, cores: Cores) -> float:
    """The share of the time in which a run on a CPU neither computes nor waits for anything that is measured."""
    if f.on_gpu or f.get("system.cpu_wait") is None:
        return 0.0
    reading = f.of("loader.read_s") / max(f.seconds * f.threads, 1e-9)
    waits = min(f.of("data_wait"), 1.0) * min(1.0, 2 * reading)
    waits += (f.share("communication_s") or 0.0) + f.of("system.pressure_io") + f.of("system.pressure_memory")
    if f.processes > 1 and f.get("communication_s") is None:
        return 0.0  # ranks wait for each other, and nobody measured how long
    stopped_share = 1 - (cores.used + cores.waiting) / f.processes - waits
    return stopped_share if stopped_share >= MIN_STOPPED else 0.0


def _stopped_finding(cores: Cores, stopped_share: float, figures: list[tuple[str, str]]) -> Finding:
    return Finding(
        "starved by its CPU limit",
        f"{percent(stopped_share)} of the time the run neither computes nor waits for a core or a file: "
        "something stops its processes repeatedly, such as cpulimit or SIGSTOP",
        [Fix("let the run's processes run", None, faster(1 - stopped_share))],
        cost=stopped_share,
        figures=figures,
        is_cause=True,
    )
