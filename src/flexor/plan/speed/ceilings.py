"""Measures what a device can do at most: a large matrix product for arithmetic, a large copy for memory bandwidth."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexor.kernels.fp8 import E4M3, product
from flexor.train.engine.base import DTYPES

WINDOWS, WINDOW_S = 5, 0.2  # the best one counts: other load on the machine can only make it slower
RUN_WINDOWS, RUN_WINDOW_S = 3, 0.05  # before a run
GPU_EDGE, CPU_EDGE = 8192, 1024  # rows and columns of the matrices
GPU_COPY, CPU_COPY = 1 << 30, 256 << 20  # bytes: more than any cache


@dataclass(frozen=True)
class Ceilings:
    """The highest rates that were measured."""

    flops_per_s: float
    bytes_per_s: float
    """Read and written."""
    arithmetic: str
    """The type of the matrix product: TF32, float32, bf16, fp16 or fp8."""


def ceiling_of_run(device: torch.device, precision: str) -> float | None:
    """FLOP/s of a large matrix product, for a run that is about to begin; None if there is no memory for one.

    It takes a fraction of a second, and leaves nothing in GPU memory.
    """
    try:
        return _arithmetic(device, precision, RUN_WINDOWS, RUN_WINDOW_S)
    except torch.OutOfMemoryError:
        return None
    finally:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def measure_ceilings(device: torch.device, precision: str) -> Ceilings:
    """Measure with the settings of torch (such as TF32) that a run on this device has made."""
    flops = _arithmetic(device, precision, WINDOWS, WINDOW_S)
    return Ceilings(flops, _bandwidth(device), _arithmetic_type(device, precision))


def _arithmetic_type(device: torch.device, precision: str) -> str:
    if precision != "no":
        return precision
    allowed = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return "TF32" if allowed and torch.cuda.get_device_capability(device) >= (8, 0) else "float32"


def wait_for(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def seconds_each(work: Callable[[], object], count: int, device: torch.device) -> float:
    """Seconds per call, over `count` calls without waiting in between."""
    wait_for(device)
    started = time.perf_counter()
    for _ in range(count):
        work()
    wait_for(device)
    return (time.perf_counter() - started) / count


def _arithmetic(device: torch.device, precision: str, windows: int, window_s: float) -> float:
    edge, dtype = CPU_EDGE if device.type == "cpu" else GPU_EDGE, DTYPES[precision]
    generator = torch.Generator(device).manual_seed(0)  # a run's random values do not depend on a measurement
    left, right = (torch.randn(edge, edge, device=device, generator=generator).to(dtype) for _ in range(2))
    if precision == "fp8":
        left, right, scale = left.to(E4M3), right.to(E4M3), torch.ones((), device=device)
        multiply = functools.partial(product, left, right, (scale, scale), dtype, exact_sums=False)
        return 2 * edge**3 / fastest(multiply, device, windows, window_s)
    out = torch.empty_like(left)
    return 2 * edge**3 / fastest(lambda: torch.mm(left, right, out=out), device, windows, window_s)


def _bandwidth(device: torch.device) -> float:
    size = CPU_COPY if device.type == "cpu" else GPU_COPY
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / fastest(lambda: target.copy_(source), device, WINDOWS, WINDOW_S)


def fastest(work: Callable[[], object], device: torch.device, windows: int, window_s: float) -> float:
    """Seconds of a call in the fastest of some time windows."""
    work()  # libraries initialise themselves
    count = max(1, int(window_s / max(seconds_each(work, 1, device), 1e-9)))
    return min(seconds_each(work, count, device) for _ in range(windows))
