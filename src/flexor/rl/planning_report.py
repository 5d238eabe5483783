"""Plans of runs that learn while they act, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexor.core.console import table
from flexor.core.machine import gigabytes
from flexor.rl.planning import OnlinePlan
from flexor.runs.text import duration_text

PLACES = {"cuda": "on the GPU", "cpu": "in host memory", "file": "in a file"}


def to_json(plan: OnlinePlan, rate_hz: float, assumed: str = "") -> dict[str, Any]:
    rl = plan.config.rl
    return {
        "policy": plan.config.policy.type,
        "gpu": plan.gpu.name,
        "fits": plan.fits,
        "reasons": [*plan.reasons],
        "gpu_memory_bytes": plan.gpu_memory,
        "buffer": {
            "observations": rl.observations,
            "demonstrations": plan.demonstrations,
            "storage": plan.storage,
            "bytes": plan.buffer,
        },
        "host_memory_bytes": plan.host_memory,
        "disk": {
            "records_bytes": plan.records,
            "checkpoint_bytes": plan.checkpoint,
            "total_bytes": plan.disk,
        },
        "update_s": plan.update_s,
        "updates_per_s": 1 / plan.update_s,
        "cuda_graph": plan.update.graph,
        "updates_per_step": rl.updates,
        "rate_hz": rate_hz,
        "run_s": plan.seconds(rate_hz),
        "parameters": plan.parameters,
        "assumed": assumed,
    }


def render(plans: Sequence[OnlinePlan], rate_hz: float, assumed: str = "") -> str:
    """The first plan in detail, and a line for each GPU."""
    plan = plans[0]
    parts = [_details(plan, rate_hz, assumed)]
    if len(plans) > 1:
        rows: list[list[object]] = [["GPU", "", "GPU memory", "buffer", "updates/s", "run"]]
        for each in plans:
            verdict = "fits" if each.fits else "DOES NOT FIT"
            speed, run = f"{1 / each.update_s:.3g}", duration_text(each.seconds(rate_hz))
            place = PLACES[each.storage]
            rows.append([each.gpu.name, verdict, gigabytes(each.gpu_memory), place, speed, run])
        parts.append(table(rows))
    return "\n\n".join(parts)


def _details(plan: OnlinePlan, rate_hz: float, assumed: str) -> str:
    config, rl = plan.config, plan.config.rl
    kind, verdict = config.policy.type, "fits" if plan.fits else "DOES NOT FIT"
    each = "as many updates as it manages" if rl.updates == "max" else f"{rl.updates} update(s) per step"
    demonstrations = f" and {plan.demonstrations:,} demonstrated" if plan.demonstrations else ""
    network = plan.gpu_memory - (plan.buffer if plan.storage == "cuda" else 0)
    rows = [
        (
            "buffer",
            f"{rl.observations:,} observations{demonstrations}: {gigabytes(plan.buffer)}, {_place(plan)}",
        ),
        ("GPU memory", f"{gigabytes(plan.gpu_memory)}, of which {gigabytes(network)} to learn"),
        ("host memory", gigabytes(plan.host_memory)),
        ("disk", f"{gigabytes(plan.records)} of records, {gigabytes(plan.checkpoint)} per checkpoint"),
        ("update", f"{1e3 * plan.update_s:.3g} ms{' as a CUDA graph' if plan.update.graph else ''}"),
        ("run", f"{config.steps:,} steps at {rate_hz:g} Hz, {each}: {duration_text(plan.seconds(rate_hz))}"),
    ]
    head = [f"{kind} {verdict} on {plan.gpu.name}, with {gigabytes(plan.gpu_memory)} of its memory."]
    head += [f"  {reason[:1].upper()}{reason[1:]}." for reason in plan.reasons]
    notes = [f"Assumed: {assumed}."] if assumed else []
    notes += ["Times were computed, not measured: updates have not been measured on a GPU."]
    if plan.storage != "cuda":
        notes += [f"Of an update, {1e3 * plan.gathering_s:.3g} ms are for a batch from host memory: a guess."]
    return "\n".join([*head, "", table(rows), "", *notes])


def _place(plan: OnlinePlan) -> str:
    automatic = " (rl.storage=auto)" if plan.config.rl.storage == "auto" else ""
    return f"{PLACES[plan.storage]}{automatic}"
