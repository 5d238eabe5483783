"""`flexor bench policy`: measures how long a policy takes to predict a chunk of actions, from images to actions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flexor.bench.step import Way, name_of
from flexor.core.console import table
from flexor.core.devices import find_device
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.rng import Noise
from flexor.evaluate.play import full_float32
from flexor.plan.speed.ceilings import wait_for
from flexor.plan.trace.rehearsal import rehearsed_pipelines
from flexor.policies import make_policy
from flexor.policies.base import PolicyConfig
from flexor.policies.features import Kind
from flexor.policies.pretrained import Pretrained, load_pretrained, read_config
from flexor.serve.open import Precision, compute_in, weights_dtype

BATCHES = (1, 8)
GPU_CALLS, CPU_CALLS = 30, 3
WARM_UP = 3  # the first is eager, the second is captured


def bench_policy(
    policies: Iterator[Pretrained],
    batches: Sequence[int] = BATCHES,
    calls: int | None = None,
    dtype: Precision | None = None,
) -> dict[str, Any]:
    """Measure each policy with each batch; on an NVIDIA GPU eagerly and as a CUDA graph."""
    if min(batches) < 1 or (calls is not None and calls < 1):
        raise ConfigError("--batches and --calls must be at least 1.")
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {}
    for policy in policies:
        device = next(policy.policy.parameters()).device
        ways: tuple[Way, ...] = ("eager", "graph") if device.type == "cuda" else ("eager",)
        count = calls or (GPU_CALLS if device.type == "cuda" else CPU_CALLS)
        cameras = len(policy.policy.config.images)
        for batch in batches:
            for way in ways:
                log.info("measuring: cameras %d, batch %d, %s", cameras, batch, way)
                with computing_in(dtype, policy):
                    measured = measure(policy, batch, way, count)
                rows.append({"cameras": cameras, "batch": batch, "way": way, **measured})
        config = policy.policy.config
        report = {
            "policy": config.type,
            "dtype": dtype or getattr(config, "dtype", None) or _main_dtype(policy),
            "device": name_of(device),
            "torch": torch.__version__,
            "parameters": sum(p.numel() for p in policy.policy.parameters()),
            "chunk": len(config.action_deltas),
            "executed": config.action_steps,
        }
        del policy
    return {**report, "rows": rows}


def untrained(config: PolicyConfig, dtype: Precision | None = None) -> Pretrained:
    """The policy with random weights, and processing that does not change values."""
    changes: dict[str, Any] = {**weights_dtype(dtype, config)}
    config = replace(config, **changes)
    device = find_device(config.device)
    with device:
        policy = make_policy(config)
    if getattr(config, "dtype", None):
        policy.cast_to_act({name: weight.dtype for name, weight in policy.named_parameters()})
    policy = policy.to(device).eval()
    return Pretrained(policy, *rehearsed_pipelines(config, device))


def trained(path: str, device: str | None, dtype: Precision | None = None) -> Pretrained:
    overrides: dict[str, Any] = {**weights_dtype(dtype, read_config(path))}
    return load_pretrained(path, str(find_device(device)), overrides)


def _main_dtype(policy: Pretrained) -> str:
    """The type of the largest weight."""
    largest = max(policy.policy.parameters(), key=lambda weight: weight.numel())
    return str(largest.dtype).removeprefix("torch.")


@contextmanager
def computing_in(dtype: Precision | None, policy: Pretrained) -> Iterator[None]:
    """Compute as `flexor serve --dtype` does."""
    device = next(policy.policy.parameters()).device
    with full_float32():  # which is undone afterwards, like what compute_in sets
        lower = compute_in(dtype, policy.policy)
        with torch.autocast(device.type, lower, enabled=lower is not None):
            yield


def measure(policy: Pretrained, batch: int, way: Way, calls: int) -> dict[str, Any]:
    """Milliseconds from observations in host memory to actions in host memory."""
    device = next(policy.policy.parameters()).device
    policy = replace(policy)  # with graphs of its own
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        policy.graphs.gave_up = way == "eager"
    observation, task = synthetic_observation(policy.policy.config, batch), ["pick up the block"] * batch
    noise = Noise(0, 0, torch.arange(batch))
    for _ in range(WARM_UP if device.type == "cuda" else 1):
        policy.chunk(observation, task, noise)
    if way == "graph" and policy.graphs.gave_up:
        return {"reason": "the prediction can't be captured in a CUDA graph"}
    times = []
    for _ in range(calls):
        wait_for(device)
        started = time.perf_counter()
        policy.chunk(observation, task, noise)
        times.append(1e3 * (time.perf_counter() - started))
    figures = {"median_ms": statistics.median(times), "slowest_ms": max(times)}
    if device.type == "cuda":
        figures["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
    return figures


def synthetic_observation(config: PolicyConfig, batch: int) -> dict[str, np.ndarray]:
    """Random images and states, as robots send them."""
    rng = np.random.default_rng(0)
    steps = [] if config.observation_deltas is None else [sum(d <= 0 for d in config.observation_deltas)]
    return {
        name: rng.integers(0, 256, (batch, *steps, *feature.shape), dtype=np.uint8)
        if feature.type is Kind.VISUAL
        else rng.uniform(-1, 1, (batch, *steps, *feature.shape)).astype(np.float32)
        for name, feature in config.observed.items()
    }


def render_policy(report: dict[str, Any]) -> str:
    lines = [
        f"{report['policy']}: {report['parameters'] / 1e6:,.1f} M parameters, {report['dtype']}, on "
        f"{report['device']}, torch {report['torch']}; a chunk is {report['chunk']} actions, {report['executed']} are "
        "executed",
        "",
    ]
    cells = [["cameras", "batch", "", "median, ms", "slowest, ms", "peak GPU memory"]]
    for row in report["rows"]:
        start = [str(row["cameras"]), str(row["batch"]), row["way"]]
        if "reason" in row:
            cells.append([*start, row["reason"], "", ""])
            continue
        peak = row.get("peak_memory_bytes")
        times = [f"{row['median_ms']:,.2f}", f"{row['slowest_ms']:,.2f}"]
        cells.append([*start, *times, "-" if peak is None else f"{peak / 1e9:,.2f} GB"])
    return "\n".join([*lines, table(cells)])
