"""`flexor bench step`: measures the training step of a policy, without data, and compares it with the hardware limit.

The step is the trainer's own, eager and as one CUDA graph, on a synthetic batch that stays on the device. Its FLOPs and
bytes are those of the planner's trace.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from flexor.config.for_gpu import settle_for_gpu
from flexor.config.schema import SHARDED, TrainConfig
from flexor.core.batch import SAMPLE_ID, Batch
from flexor.core.devices import find_device
from flexor.core.errors import ConfigError, FlexorError
from flexor.core.log import log
from flexor.core.machine import gigabytes, let_gpu_memory_grow
from flexor.plan.speed.ceilings import Ceilings, measure_ceilings, seconds_each, wait_for
from flexor.plan.speed.measure import Stopwatch
from flexor.plan.speed.time import steps_ops
from flexor.plan.trace.rehearsal import Rehearsal
from flexor.plan.trace.trace import trace_step
from flexor.train.compile import CompileTime
from flexor.train.engine.base import Engine
from flexor.train.graph import WARM_UP, GraphStep, NoGraph
from flexor.train.ranks.split import Split, split_batch

Way = Literal["eager", "graph"]
WAYS: tuple[Way, ...] = ("eager", "graph")
WINDOWS = 3  # the median counts
PROFILED = 3  # steps whose kernels are counted
GPU_STEPS, CPU_STEPS = 20, 2  # in a window
AFTER_CAPTURE = 3  # steps before the measurement


class RepeatedStep:
    """The trainer's own step of the last phase, repeated on a synthetic batch that stays on the device."""

    def __init__(self, config: TrainConfig, device: torch.device, engine: Engine | None = None):
        """`engine`: that of a rank; by default the engine of one process."""
        split = split_batch(config, 1)
        self.run = Rehearsal(config, split.batch_size, split.accumulation, Stopwatch(), device, engine)
        self.run.state.step = self.run.steps_to_trace()[-1]
        self.batches = [synthetic(batch) for batch in self.run.load()]

    def __call__(self) -> None:
        self.run.run_step(self.batches, self.run.meters)

    def check_captured(self) -> None:
        """After the first steps: with step=graph, they must have been captured."""
        step = self.run.run_step
        if self.run.config.step == "graph" and isinstance(step, GraphStep) and not step.captured:
            raise NoGraph("the policy asks to run these steps eagerly (its graph_key() is None)")


def synthetic(batch: Batch) -> Batch:
    """The batch with random values: a GPU computes with zeros faster, because they take less power."""
    generator = torch.Generator().manual_seed(0)

    def value(name: str, old: Any) -> Any:
        if name == SAMPLE_ID:
            return torch.arange(len(old), device=old.device)
        if not isinstance(old, Tensor) or not (old.is_floating_point() or old.dtype == torch.uint8):
            return old  # such as tokens and positions, whose values must be valid
        new = torch.empty(old.shape, dtype=old.dtype)
        if old.is_floating_point():
            return new.uniform_(-1, 1, generator=generator).to(old.device)
        return new.random_(0, 256, generator=generator).to(old.device)

    return {name: value(name, old) for name, old in batch.items()}


@dataclass(frozen=True)
class StepCost:
    """FLOPs and bytes of a step, summed over its operations; None if the policy can't be planned."""

    flops: float | None = None
    bytes: float | None = None


def bench_step(config: TrainConfig, ways: Sequence[Way] = WAYS, steps: int | None = None) -> dict[str, Any]:
    """Measure the step in these ways. `config` must have the policy's features filled in."""
    _check(config, steps)
    let_gpu_memory_grow()
    device = find_device(config.policy.device)
    on_gpu = device.type == "cuda"
    config = settle_for_gpu(config, torch.cuda.get_device_capability(device) if on_gpu else None)
    if not on_gpu and "eager" in ways:
        ways = ("eager",)
    split = split_batch(replace(config), 1)
    log.info("tracing a step of %s", config.policy.type)
    work = step_work(config, split, device)
    count = steps or (GPU_STEPS if on_gpu else CPU_STEPS)
    rows = [_row(config, way, count, split, device) for way in ways]
    log.info("measuring the ceilings of %s", name_of(device))
    ceilings = measure_ceilings(device, config.precision)
    return {
        "policy": config.policy.type,
        "device": name_of(device),
        "torch": torch.__version__,
        "batch_size": split.batch_size,
        "gradient_accumulation_steps": split.accumulation,
        "precision": config.precision,
        "compile": config.compile,
        "channels_last": config.channels_last,
        "flops_per_step": work.flops,
        "bytes_per_step": work.bytes,
        "ceilings": asdict(ceilings),
        "rows": [row if "reason" in row else with_shares(row, work, ceilings) for row in rows],
        "note": None if on_gpu else _without_gpu(device),
    }


def _check(config: TrainConfig, steps: int | None) -> None:
    if steps is not None and steps < 1:
        raise ConfigError(f"--steps={steps} must be at least 1.")
    if config.parallel.strategy in SHARDED:
        raise ConfigError(
            f"parallel.strategy={config.parallel.strategy}: this measures the step of one process, which has the whole "
            "model. Remove the option."
        )


def _without_gpu(device: torch.device) -> str:
    return f"no NVIDIA GPU: measured on {device.type}, without a CUDA graph, the number of kernels and GPU memory."


def name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)" if device.type == "cpu" else device.type


@dataclass(frozen=True)
class ThisDevice:
    """The properties that a trace needs."""

    memory: int
    compute_capability: tuple[int, int] | None


def step_work(config: TrainConfig, split: Split, device: torch.device) -> StepCost:
    """From the planner's trace. Copying the batch to the device does not count: it is there."""
    card = ThisDevice(0, torch.cuda.get_device_capability(device) if device.type == "cuda" else None)
    try:
        trace = trace_step(config, split.batch_size, card, split.accumulation)
    except ConfigError as error:
        log.warning("%s So the shares of the ceilings are unknown.", error)
        return StepCost()
    ops = [op for op in steps_ops(trace) if op.phase != "load"]
    return StepCost(sum(op.flops for op in ops), float(sum(op.read + op.written for op in ops)))


def _row(config: TrainConfig, way: Way, steps: int, split: Split, device: torch.device) -> dict[str, Any]:
    """The measurements of a way, or the reason why there are none."""
    log.info("measuring %s", "eager steps" if way == "eager" else "the step as a CUDA graph")
    try:
        return {"way": way, **_measure(replace(config, step=way), steps, split, device)}
    except NoGraph as error:
        return {"way": way, "reason": f"{error.reason}."}
    except torch.OutOfMemoryError as error:
        if way == "graph":
            return {"way": way, "reason": "the GPU has too little free memory for the graph."}
        raise FlexorError(_too_large(split, device)) from error
    finally:
        _free(device)


def _too_large(split: Split, device: torch.device) -> str:
    free, total = torch.cuda.mem_get_info(device)
    available = free + torch.cuda.memory_reserved(device)
    return (
        f"batch_size={split.batch_size} does not fit into the memory of {name_of(device)} ({gigabytes(total)}, of "
        f"which {gigabytes(available)} are available). Use a smaller --batch_size, --precision=bf16 or "
        "--activation_checkpointing=true. `flexor plan` shows what fits."
    )


def _measure(config: TrainConfig, steps: int, split: Split, device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    step = RepeatedStep(config, device)
    compiling = CompileTime(step.run.policy) if config.compile else None
    for _ in range(WARM_UP + AFTER_CAPTURE if on_gpu else 1):
        step()
    step.check_captured()
    if compiling:
        compiling.log()
    seconds = statistics.median(seconds_each(step, steps, device) for _ in range(WINDOWS))
    figures: dict[str, Any] = {"step_ms": 1e3 * seconds, "samples_per_s": split.share / seconds}
    if compiling:
        figures["compile_s"] = compiling.seconds
    if on_gpu:
        figures["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
        figures["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        figures |= _kernels(step, seconds, device)
    return figures


def _kernels(step: RepeatedStep, seconds: float, device: torch.device) -> dict[str, Any]:
    """How many kernels a step runs, and for which share of the step the GPU runs nothing."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    # CUPTI, which counts the kernels, may crash with graphs if it is shut down between two profiles.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    wait_for(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            step()
        wait_for(device)
    events = [
        event
        for event in profiled.events() or []
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    if not events:
        log.warning("torch's profiler recorded no kernels, so their number and the idle share are unknown")
        return {"kernels": None, "idle_share": None}
    busy = sum(event.time_range.elapsed_us() for event in events) * 1e-6 / PROFILED
    kernels = sum(not event.name.startswith(("Memcpy", "Memset")) for event in events)
    return {"kernels": round(kernels / PROFILED), "idle_share": max(0.0, 1 - busy / seconds)}


def _free(device: torch.device) -> None:
    """Free the memory of a measurement before the next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def with_shares(row: dict[str, Any], work: StepCost, ceilings: Ceilings) -> dict[str, Any]:
    """The row with its shares of the ceilings."""
    seconds = row["step_ms"] / 1e3

    def share(amount: float | None, ceiling: float) -> float | None:
        return None if amount is None else amount / seconds / ceiling

    return {
        **row,
        "of_arithmetic": share(work.flops, ceilings.flops_per_s),
        "of_bandwidth": share(work.bytes, ceilings.bytes_per_s),
    }
