"""Whether a run gets the cores that it could use, and if not, why.

A thread that could run but has no core waits. If the run's threads wait although the run uses fewer cores than it may,
somebody else uses them. Without neighbours it would use all cores that its threads ask for, up to those it may use.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexor.core.findings import Finding, Fix
from flexor.runs.diagnosis.figures import Figures
from flexor.runs.diagnosis.verdict import faster, percent

LEAST_THROTTLED = 0.1  # share of the time: less is noise
LEAST_HELD = 0.3


@dataclass(frozen=True)
class Cores:
    own: float
    """Cores in use by the run."""
    waiting: float
    """Threads that have no core, on average."""
    allowed: float
    usable: float
    """Less than `allowed` if a container limits the time on them."""
    others: float

    @property
    def lost(self) -> float:
        """Share of the work that could have been done, and was not."""
        could = min(self.own + self.waiting, self.allowed)
        return max(0.0, 1 - self.own / could) if could > 0 else 0.0

    @property
    def idle(self) -> float:
        """Cores that nobody uses."""
        return max(0.0, min(self.allowed - self.others, self.usable) - self.own)


def cores_of(f: Figures) -> Cores | None:
    own, allowed = f.get("system.cpu_own"), f.get("system.cpu_allowed")
    if own is None or not allowed or allowed <= 0 or own < 0:
        return None
    waiting = f.get("system.cpu_wait")
    if waiting is None:  # a system that does not count it per thread
        waiting = f.of("system.pressure_cpu")
    usable = f.of("system.cpu_usable", allowed)
    return Cores(own, max(waiting, 0.0), allowed, usable, max(f.of("system.cpu_others"), 0.0))


def starved(f: Figures, needs_cores: float) -> list[Finding]:
    """`needs_cores`: share of the time in which a step waits for work that needs cores."""
    cores = cores_of(f)
    if cores is None:
        return []
    figures = [
        ("cores in use by the run", f"{cores.own:.1f} of {cores.usable:.4g}"),
        ("its threads that wait for a core", f"{cores.waiting:.1f}"),
        ("cores in use by others", f"{cores.others:.1f}"),
    ]
    cost = min(cores.lost, needs_cores)
    throttled = f.of("system.cpu_throttled")
    limited = cores.usable < cores.allowed and throttled >= LEAST_THROTTLED
    if limited:
        return [_by_limit(cores, throttled, cost, figures)]
    held = _held(f, cores)
    if held:
        return [_held_back(cores, held, figures)]
    missing = min(cores.own + cores.waiting, cores.allowed) - cores.own
    if cores.others < 0.5 * missing:
        return []
    stolen = f.of("system.cpu_stolen")
    if stolen >= 0.02:
        figures.append(("taken by other virtual machines", percent(stolen)))
    speedup = faster(1 - cost)
    return [
        Finding(
            "starved by neighbours",
            f"other processes use {cores.others:.1f} of {cores.allowed:.4g} cores, and {cores.waiting:.1f} of its "
            f"threads wait for one on average: it gets {percent(1 - cores.lost)} of the computing that it could use",
            [Fix("stop the other processes, or give the run cores of its own", None, speedup)],
            cost=cost,
            figures=figures,
            is_cause=True,
        )
    ]


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


def _held(f: Figures, cores: Cores) -> float:
    """The share of the time in which a run on a CPU neither computes nor waits for anything that is known."""
    if f.on_gpu or f.get("system.cpu_wait") is None:
        return 0.0
    reading = f.of("loader.read_s") / max(f.seconds * f.threads, 1e-9)
    waits = min(f.of("data_wait"), 1.0) * min(1.0, 2 * reading)
    waits += (f.share("communication_s") or 0.0) + f.of("system.pressure_io") + f.of("system.pressure_memory")
    if f.processes > 1 and f.get("communication_s") is None:
        return 0.0  # ranks wait for each other, and nobody measured how long
    held = 1 - (cores.own + cores.waiting) / f.processes - waits
    return held if held >= LEAST_HELD else 0.0


def _held_back(cores: Cores, held: float, figures: list[tuple[str, str]]) -> Finding:
    return Finding(
        "starved by its CPU limit",
        f"{percent(held)} of the time the run neither computes nor waits for a core or a file: something stops its "
        f"processes again and again, such as cpulimit or SIGSTOP",
        [Fix("let the processes of the run run", None, faster(1 - held))],
        cost=held,
        figures=figures,
        is_cause=True,
    )
