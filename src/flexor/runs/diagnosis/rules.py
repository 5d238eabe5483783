"""All rules together: from figures to findings, the most important first.

A rule computes which share of the time something costs, from figures that measure its cause. A cost of `ALARM` or more
is a verdict. A cause (a neighbour, heat, one slow rank, missing memory) ranks above its consequences (waiting for
data). If nothing costs that much, the run is bound by its GPU or its processor, as it should be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flexor.core.findings import Finding, Fix
from flexor.runs.diagnosis.compute import launch_bound, memory_pressure, ranks_wait, shared_gpu, throttled
from flexor.runs.diagnosis.cores import starved
from flexor.runs.diagnosis.data import copy_bound, data_bound, loader_time
from flexor.runs.diagnosis.figures import Figures, Reports, figures_of, mapping, number
from flexor.runs.diagnosis.online import online_verdict
from flexor.runs.diagnosis.pauses import paused
from flexor.runs.diagnosis.verdict import ALARM, Diagnosis, percent, weight
from flexor.runs.state import CPU_BOUND, GPU_BOUND

LEAVE = 0.1  # the previous verdict stays until it costs less than this


def diagnose(f: Figures, previous: str | None = None) -> Diagnosis:
    """Apply all rules. `previous`: the verdict so far, which stays at a lower cost than a new one needs."""
    launch = launch_bound(f)
    findings = [
        *data_bound(f),
        *copy_bound(f),
        *launch,
        *ranks_wait(f),
        *throttled(f),
        *shared_gpu(f),
        *memory_pressure(f),
        *paused(f),
        *starved(f, _needs_cores(f, sum(finding.cost for finding in launch))),
    ]
    alarms = [
        finding for finding in findings if finding.cost >= (LEAVE if finding.name == previous else ALARM)
    ]
    alarms.sort(key=weight, reverse=True)
    if not f.steps:  # of ordinary ones, because of the pauses
        return Diagnosis(alarms, f.pauses.seconds, round(f.pauses.steps))
    return Diagnosis(alarms or [online_verdict(f) or _healthy(f)], f.seconds, round(f.steps))


def _needs_cores(f: Figures, launching: float) -> float:
    """The share of the time in which the run waits for work on the processor."""
    wait, time = min(f.of("data_wait"), 1.0), loader_time(f)
    loading = wait * (time.needs_cores if time else 1.0)
    return min(loading + launching, 1.0) if f.on_gpu else max(1 - wait, 0.0) + loading


def _healthy(f: Figures) -> Finding:
    wait = percent(min(f.of("data_wait"), 1.0))
    if not f.on_gpu:
        evidence = f"it computes most of the time and waits for data {wait} of it"
        fixes = [Fix("train on a GPU: `flexor plan` with the same flags compares them")]
        figures = [("waiting for data", wait), *_step_rows(f)]
        return Finding(CPU_BOUND, evidence, fixes, cost=0.0, figures=figures)
    busy = f.get("system.gpu_util") if f.get("system.gpu_util") is not None else f.get("gpu_busy")
    evidence = f"the GPU is busy {percent(busy or 0.0)} of the time, and waits for data {wait} of it"
    figures = [("GPU busy", percent(busy or 0.0)), ("waiting for data", wait), *_step_rows(f)]
    ceiling = f.get("ceiling_share")
    if ceiling is not None:
        evidence += f"; it reaches {percent(ceiling)} of its measured arithmetic ceiling"
        figures.append(("of its arithmetic ceiling", percent(ceiling)))
    return Finding(GPU_BOUND, evidence, _still_faster(f), cost=0.0, figures=figures)


def _step_rows(f: Figures) -> list[tuple[str, str]]:
    names = {"forward_s": "forward", "backward_s": "backward", "optimizer_s": "optimizer"}
    shares = {title: f.share(name) for name, title in names.items()}
    rows = [(title, percent(share)) for title, share in shares.items() if share is not None]
    return [("step", f"{1e3 * f.step_s:.4g} ms"), *rows]


def _still_faster(f: Figures) -> list[Fix]:
    precision = mapping(f.record.get("machine")).get("precision") or f.setting("precision")
    fixes = []
    if precision == "no":
        fixes.append(Fix("computes matrix products in bf16; it rounds differently", "--precision=bf16"))
    if f.setting("compile") is False:
        fixes.append(Fix("compiles the policy", "--compile=true"))
    return fixes


def diagnose_lines(
    lines: Iterable[Mapping[str, Any]],
    config: Mapping[str, Any] | None = None,
    record: Mapping[str, Any] | None = None,
) -> tuple[Diagnosis, Figures, Reports]:
    """The verdict of the last lines of a run's metrics; without findings if there are too few lines."""
    batch = number((config or {}).get("global_batch_size"))
    reports = Reports(int(batch) if batch and batch > 0 else None)
    for line in lines:
        reports.add(line)
    figures = figures_of(reports, config, record)
    return (diagnose(figures) if reports.enough else Diagnosis()), figures, reports
