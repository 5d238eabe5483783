"""A study of a run as JSON, for programs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from flexor.plan.advise import Change
from flexor.plan.compare import Comparison
from flexor.plan.plan import Plan
from flexor.plan.rank import Choice


def to_json(study: Comparison) -> dict[str, Any]:
    """Everything in the study. Each key includes its unit."""
    result = {
        **plan_to_json(study.plan, study.alone_s),
        "changes": [change_to_json(change) for change in study.changes],
        "remedy": [change.setting for change in study.remedy],
        "choices": [choice_to_json(choice) for choice in study.choices],
    }
    return json.loads(json.dumps(_finite(result)))


def plan_to_json(plan: Plan, alone_s: float) -> dict[str, Any]:
    """One plan. `alone_s`: a step with the same batch per GPU, if there were only one GPU."""
    result = {
        "policy": plan.config.policy.type,
        "gpu": plan.site.gpu.name,
        "gpus": plan.site.gpus,
        "nodes": plan.site.nodes,
        "strategy": plan.memory.parallelism.strategy,
        "batch_size": plan.split.batch_size,
        "accumulation": plan.split.accumulation,
        "global_batch_size": plan.split.global_batch,
        "steps": plan.config.steps,
        "epochs": plan.epochs,
        "parameters": plan.parameters,
        "trained_parameters": plan.trained,
        "fits": plan.fits,
        "largest_batch": plan.largest_batch,
        "memory": _memory(plan),
        "time": _time(plan, alone_s),
        "data": _data(plan),
        "host": _host(plan),
        "robot": _robot(plan),
        "experiments": asdict(plan.concurrent) if plan.concurrent else None,
        "money": _money(plan),
    }
    return dict(_finite(result))


def _memory(plan: Plan) -> dict[str, Any]:
    memory = plan.memory
    return {
        **{f"{name}_bytes": size for name, size in memory.parts.items()},
        "allocator_bytes": memory.allocator,
        "context_bytes": memory.context,
        "frames_bytes": plan.frames_on_gpu,
        "allocated_bytes": memory.allocated,
        "reserved_bytes": memory.reserved,
        "peak_bytes": plan.peak,
        "gpu_bytes": plan.site.gpu.memory,
        "peak_phase": memory.phase,
        "peak_module": memory.module,
        "peak_operation": memory.operation,
    }


def _time(plan: Plan, alone_s: float) -> dict[str, Any]:
    step = plan.run_time.step
    return {
        "step_s": step.seconds,
        "spread": step.spread,
        "calibrated": step.calibrated,
        "bound": step.bound,
        "graph": step.graph,
        "gpu_s": step.gpu,
        "host_s": step.host,
        "communication_s": step.communication,
        "exposed_s": step.exposed,
        "links": str(plan.site.links) or None,
        "alone_s": alone_s,
        "efficiency": alone_s / step.seconds,
        "at_best_s": step.at_best,
        "compiled_at_best_s": step.compiled_at_best,
        "flops": step.flops,
        "mfu": step.mfu,
        "waits": list(plan.waits),
        "samples_per_s": plan.samples_per_s,
        "run_s": plan.run_time.seconds,
    }


def _data(plan: Plan) -> dict[str, Any]:
    first, later = plan.run_time.first, plan.run_time.later
    return {
        "frames": plan.data.frames,
        "tier": plan.loading.tier,
        "features": {
            "tier": plan.features.tier,
            "why_off": plan.features.why_off,
            "bytes": plan.features.nbytes,
            "first_pass_s": plan.features.first_pass_s,
        },
        "bound": plan.data_bound,
        "wanted_samples_per_s": later.demand,
        "first_epoch_samples_per_s": first.loaded,
        "later_samples_per_s": later.loaded,
        "threads_needed": later.threads,
        "cores_needed": later.cores,
    }


def _host(plan: Plan) -> dict[str, Any]:
    return {
        **{f"memory_{name}_bytes": size for name, size in asdict(plan.host_memory).items()},
        "memory_bytes": plan.host_memory.total,
        **{f"disk_{name}_bytes": size for name, size in asdict(plan.disk).items()},
        "disk_bytes": plan.disk.total,
        "checkpoint_bytes": plan.checkpoint,
        "checkpoints_at_most": plan.checkpoints.most,
        "cores": plan.site.host.cores,
        "has_memory_bytes": plan.site.host.memory,
        "has_disk_bytes": plan.site.host.disk,
        "source": plan.site.host.source,
    }


def _robot(plan: Plan) -> dict[str, Any]:
    exchange = plan.robot
    return {
        "rate_hz": plan.rate_hz,
        "exchanges_per_s": exchange.per_s,
        "observation_raw_bytes": exchange.raw,
        "observation_jpeg_bytes": exchange.jpeg,
        "answer_bytes": exchange.answer,
        "up_raw_mbit_per_s": exchange.mbit_up(False),
        "up_jpeg_mbit_per_s": exchange.mbit_up(True),
        "down_mbit_per_s": exchange.mbit_down,
    }


def _money(plan: Plan) -> dict[str, Any]:
    money, site = plan.money, plan.site
    return {
        "rent_usd": money.rent,
        "rent_usd_per_hour": site.usd_per_hour,
        "rent_source": site.price_source,
        "energy_kwh": money.energy.kwh,
        "energy_usd": money.energy.usd,
        "power_w": money.energy.watts,
        "buy_usd": money.purchase.usd if money.purchase else None,
        "buying_pays_after_hours": money.break_even.hours if money.break_even else None,
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity or NaN: both become null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def change_to_json(change: Change) -> dict[str, Any]:
    assert change.effect
    return {
        "name": change.name,
        "setting": change.setting,
        "harm": change.impact.name.lower(),
        "saves_bytes": change.effect.memory,
        "step_times": change.effect.time,
        "gpus_times": change.effect.gpus,
        "why": change.why,
        "fits": change.effect.fits,
    }


def choice_to_json(choice: Choice) -> dict[str, Any]:
    split = choice.split
    return {
        "gpu": choice.gpu.name,
        "gpus": choice.gpus,
        "fits": choice.fits,
        "batch_size": split.batch_size if split else None,
        "accumulation": split.accumulation if split else None,
        "peak_bytes": choice.peak,
        "step_s": choice.step_s,
        "run_s": choice.hours * 3600,
        "spread": choice.spread,
        "bound": choice.bound,
        "rent_usd": choice.usd,
        "rent_usd_per_hour": choice.usd_per_hour,
        "energy_usd": choice.energy_usd,
    }
