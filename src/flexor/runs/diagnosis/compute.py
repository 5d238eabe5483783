"""What slows computing: the host that launches kernels, other ranks, lower clocks, too little memory."""

from __future__ import annotations

from typing import Any

from flexor.core.findings import Finding, Fix
from flexor.runs.diagnosis.figures import Figures, mapping, number
from flexor.runs.diagnosis.verdict import ALARM, faster, percent

NOTICED = 0.1
SLOW_CLOCK = 0.6  # of the highest clock: lower is never usual, whatever the reason
SLOW_RANK = 0.6  # share of the time in which it must be the same rank
FULL_COST = 0.2  # share of the time, for a GPU whose memory is full now and then: freeing waits for its work
NEARLY_FULL = 0.06  # share of the memory that is left
NEARLY_FULL_GB = 8.0


def launch_bound(f: Figures) -> list[Finding]:
    """The GPU idles although a batch is ready: the host queues its work too slowly."""
    if not f.on_gpu:
        return []
    wait, launch, util = min(f.of("data_wait"), 1.0), f.share("launch_s"), f.get("system.gpu_util")
    paused = (f.share("checkpoint_s") or 0.0) + (f.share("evaluation_s") or 0.0)
    between = max(0.0, 1 - f.of("gpu_busy", 1.0) - wait - paused)
    within = 0.0
    if util is not None and (launch is None or launch > 0.3):  # a replayed graph takes less
        within = max(0.0, 1 - util - wait - paused)  # between the operations of a step too
    cost = max(between, within)
    if cost < NOTICED:
        return []
    figures = [("GPU idle although a batch is ready", percent(cost))]
    if util is not None:
        figures.append(("GPU with a kernel running", percent(util)))
    if launch is not None:
        figures.append(("queueing a step", f"{1e3 * f.of('launch_s'):.3g} ms of {1e3 * f.step_s:.3g} ms"))
    evidence = f"the GPU idles {percent(cost)} of the time although a batch is ready"
    if launch is not None:
        launch_ms, step_ms = 1e3 * f.of("launch_s"), 1e3 * f.step_s
        evidence += f": the host takes {launch_ms:.3g} ms to queue a step of {step_ms:.3g} ms"
    return [Finding("host-launch-bound", evidence, _launch_fixes(f, cost), cost=cost, figures=figures)]


def _launch_fixes(f: Figures, cost: float) -> list[Fix]:
    fixes = []
    if f.setting("step") == "eager" and not f.setting("compile"):
        fixes.append(Fix("launches a step as one CUDA graph", "--step=auto", faster(1 - cost)))
    batch = number(f.setting("batch_size"))
    if batch:
        why = "gives the GPU more work per launch; samples per second, and it fixes the training"
        # twice the samples in the time that one launch takes, while the GPU idles
        fixes.append(Fix(why, f"--batch_size={int(2 * batch)}", min(2.0, faster(1 - cost) or 1.0)))
    return fixes


def ranks_wait(f: Figures) -> list[Finding]:
    """Ranks that wait for one of them, or for the exchange of gradients."""
    findings = []
    slowest_s, others_s = f.get("slowest.own_s"), f.get("slowest.others_s")
    waiting_share = 0.0
    rank = max(f.slow_ranks, key=f.slow_ranks.__getitem__, default=None)
    if (
        rank is not None
        and slowest_s is not None
        and others_s is not None
        and f.slow_ranks[rank] >= SLOW_RANK
    ):
        waiting_share = min(max((slowest_s - others_s) / max(f.step_s, 1e-9), 0.0), 1.0)
        host = f.last.get("slowest.host")
        on = f" on {host}" if isinstance(host, str) else ""
        if waiting_share >= NOTICED:
            evidence = (
                f"rank {rank}{on} takes {1e3 * slowest_s:.3g} ms of its own per step, the others "
                f"{1e3 * others_s:.3g} ms: they wait {percent(waiting_share)} of the time for it"
            )
            figures = [
                (f"own time of rank {rank}", f"{1e3 * slowest_s:.3g} ms"),
                ("own time of the others", f"{1e3 * others_s:.3g} ms"),
                ("it is the slowest", f"{percent(f.slow_ranks[rank])} of the time"),
            ]
            why = f"look at the machine of rank {rank}{on}, or run without it"
            fixes = [Fix(why, None, faster(1 - waiting_share))]
            facts: dict[str, Any] = {"cost": waiting_share, "figures": figures, "is_cause": True}
            findings.append(Finding(f"straggler rank {rank}", evidence, fixes, **facts))
    exchange = max((f.share("communication_s") or 0.0) - waiting_share, 0.0)
    if f.processes > 1 and exchange >= NOTICED:
        evidence = f"exchanging gradients takes {percent(exchange)} of the time"
        times = f"{1e3 * f.of('communication_s'):.3g} ms of {1e3 * f.step_s:.3g} ms"
        facts = {"cost": exchange, "figures": [("exchanging gradients", times)]}
        findings.append(Finding("communication-bound", evidence, _exchange_fixes(f, exchange), **facts))
    return findings


def _exchange_fixes(f: Figures, share: float) -> list[Fix]:
    fixes, batch = [], number(f.setting("batch_size"))
    if batch:
        why = "exchanges gradients half as often per sample; it fixes the training"
        fixes.append(Fix(why, f"--batch_size={int(2 * batch)}", faster(1 - share / 2)))
    if f.setting("parallel.strategy") in ("fsdp", "hsdp"):
        fixes.append(Fix("exchanges gradients only, if the model fits on one GPU", "--parallel.strategy=ddp"))
    return fixes


def throttled(f: Figures) -> list[Finding]:
    """Clocks below the maximum while the GPU computes. Reaching the power limit is usual, unless it was lowered."""
    clock, highest = f.get("system.gpu_sm_mhz"), f.get("system.gpu_sm_max_mhz")
    if clock is None or not highest or highest <= 0 or f.of("system.gpu_util", 1.0) < 0.3:
        return []
    ratio = min(clock / highest, 1.0)
    limit, usual = f.get("system.gpu_power_limit_w"), f.get("system.gpu_power_default_w")
    lowered = limit is not None and usual is not None and limit < 0.9 * usual
    hot = f.of("system.gpu_slowed")
    power = f.of("system.gpu_throttled")
    if hot > 0.2:
        reason = f"heat or the hardware slows it {percent(hot)} of the time"
        change = "improve its cooling; `nvidia-smi -q -d PERFORMANCE` shows the reason"
    elif lowered and power > 0.2:
        reason = f"its power limit is {limit:.0f} W instead of {usual:.0f} W"
        change = f"raise the limit: `nvidia-smi -pl {usual:.0f}`"
    elif ratio < SLOW_CLOCK:
        reason = "its clock is limited" if power <= 0.2 else "it reaches its power limit"
        change = (
            "`nvidia-smi -q -d PERFORMANCE` shows the reason; `nvidia-smi -rgc` removes a limit of the clock"
        )
    else:
        return []
    busy = max(1 - min(f.of("data_wait"), 1.0), 0.0)
    cost = (1 - ratio) * busy
    if cost < NOTICED:
        return []
    figures = [
        ("GPU clock", f"{clock:.0f} of {highest:.0f} MHz"),
        ("temperature", f"{f.of('system.gpu_temperature_c'):.0f} C"),
        ("power", f"{f.of('system.gpu_power_w'):.0f} W"),
    ]
    if limit is not None:
        figures.append(("power limit", f"{limit:.0f} W" + (f", usually {usual:.0f} W" if usual else "")))
    evidence = f"the GPU runs at {clock:.0f} of {highest:.0f} MHz: {reason}"
    fixes = [Fix(change, None, faster(1 - cost))]
    return [Finding("throttled", evidence, fixes, cost=cost, figures=figures, is_cause=True)]


def shared_gpu(f: Figures) -> list[Finding]:
    """Other processes that compute on the same GPU."""
    others_util = f.of("system.gpu_util_others")
    if others_util < NOTICED:
        return []
    memory = f.of("system.gpu_vram_others_gb")
    share = percent(others_util)
    evidence = f"other processes compute on its GPU {share} of the time and use {memory:.3g} GB of its memory"
    figures = [("GPU in use by others", share), ("its memory in use by others", f"{memory:.3g} GB")]
    fixes = [Fix("stop the other processes, or use another GPU", None, faster(1 - others_util))]
    facts: dict[str, Any] = {"cost": others_util, "figures": figures, "is_cause": True}
    return [Finding("starved by neighbours", evidence, fixes, **facts)]


def memory_pressure(f: Figures) -> list[Finding]:
    return [*_gpu_memory(f), *_host_memory(f)]


def _gpu_memory(f: Figures) -> list[Finding]:
    retries = f.rising.get("memory.retries", 0.0)
    if retries <= 0:
        return []
    total, peak = f.get("system.gpu_vram_total_gb"), f.get("memory.peak_gb")
    others_gb = f.of("system.gpu_vram_others_gb")
    times = f"{retries:.0f} times in {f.steps:.0f} steps"
    evidence = f"GPU memory was full {times}, and was freed and allocated again"
    figures = [("allocations that failed at first", f"{retries:.0f}")]
    if peak is not None:
        figures.append(("peak of the run", f"{peak:.3g} GB" + (f" of {total:.3g} GB" if total else "")))
    if others_gb > 0:
        figures.append(("in use by others", f"{others_gb:.3g} GB"))
        evidence += f"; other processes use {others_gb:.3g} GB of it"
    fixes = []
    batch = number(f.setting("batch_size"))
    if batch and batch >= 2 and batch % 2 == 0:
        why = "computes the same step in smaller passes"
        fixes.append(Fix(why, f"--batch_size={int(batch // 2)}"))  # the global batch stays
    if not f.setting("activation_checkpointing"):
        fixes.append(Fix("recomputes activations instead of keeping them", "--activation_checkpointing=true"))
    return [Finding("memory-pressure", evidence, fixes, cost=FULL_COST, figures=figures, is_cause=True)]


def _host_memory(f: Figures) -> list[Finding]:
    stalled = f.of("system.pressure_memory")
    total, used = f.get("system.ram_total_gb"), f.get("system.ram_used_gb")
    where = "host memory"
    limit = f.get("system.ram_limit_gb")
    if limit is not None and (
        total is None or used is None or limit - f.of("system.ram_limit_used_gb") < total - used
    ):
        total, used, where = limit, f.of("system.ram_limit_used_gb"), "the memory of its container or job"
    left = None if total is None or used is None else total - used
    full = left is not None and total is not None and left < min(NEARLY_FULL * total, NEARLY_FULL_GB)
    if stalled < NOTICED and not full:
        return []
    figures = [("time stalled by missing memory", percent(stalled))]
    if left is not None:
        figures.append((f"left of {where}", f"{left:.3g} of {total:.3g} GB"))
    run_gb, swap = f.get("system.ram_own_gb"), f.of("system.swap_used_gb")
    if run_gb is not None:
        figures.append(("in use by the run", f"{run_gb:.3g} GB"))
    if swap > 0.01:
        figures.append(("swapped to disk", f"{swap:.3g} GB"))
    evidence = f"{left:.2g} GB of {where} are left" if left is not None else "memory is short"
    if stalled >= NOTICED:
        evidence += f", and processes wait {percent(stalled)} of the time for memory"
    cost = max(stalled, ALARM if full else 0.0)
    fixes = _host_memory_fixes(f)
    return [Finding("memory-pressure", evidence, fixes, cost=cost, figures=figures, is_cause=True)]


def _host_memory_fixes(f: Figures) -> list[Fix]:
    fixes = []
    if f.last.get("loader.cache") == "ram":
        decoded = number(mapping(f.record.get("dataset")).get("decoded_gb"))
        size = f" ({decoded:.2g} GB)" if decoded else ""
        fixes.append(Fix(f"caches decoded frames{size} on disk, not in memory", "--dataset.cache.tier=disk"))
    if f.last.get("loader.cache") == "features ram":
        why = "keeps features of images on disk, not in memory"
        fixes.append(Fix(why, "--dataset.cache.features=disk"))
    pool = number(f.setting("dataset.cache.pool_gb"))
    if f.last.get("loader.cache") == "none" and (pool is None or pool > 0.5):
        fixes.append(Fix("keeps fewer decoded frames ready", "--dataset.cache.pool_gb=0.5"))
    fixes.append(Fix("stop other processes, or use a machine with more memory"))
    return fixes
