"""The real speed of a GPU and its host: measured operations, and estimates for other operations based on them.

The data sheet gives a lower limit for the time: from FLOPs, from bytes, and from the time of the smallest kernel. The
ratio of the real time to this limit depends on the operation and its extents. It is looked up among measured
operations: the nearest ones with the same name and type. On the GPU where they were measured this is interpolation.
For another GPU it is an assumption: that its kernels miss their limit by the same factor.
"""

from __future__ import annotations

import functools
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from flexor.core.errors import ConfigError
from flexor.core.machine import cache_folder
from flexor.plan.site.hardware import GPU
from flexor.plan.trace.ops import UNALIGNED_ROWS, Layout, Op

KERNEL = 2e-6  # GPU seconds of the smallest kernel
NEIGHBOURS = 3
BLUR = 0.1  # squared distance (in log2 of an extent) below which neighbours have about equal weight
POSITIONS = 0.5
"""How much the number of pixels counts in the distance of two convolutions, relative to their channels. Chosen where
samples are predicted best from the other samples."""
RATIO = 3.0
"""How much the ratio of bytes read to bytes written counts in the distance of two memory operations, relative to their
bytes: it tells a product of two tensors from one with a broadcast vector, which takes three times its limit. Chosen
where samples are predicted best from the other samples, as is the next one."""
SATURATED = 28.0  # log2 of the bytes above which a single kernel takes the same time per byte
NAMES = 11  # kinds of memory operations that one which was not measured is compared with
UNALIGNED = 2.0
"""Time of a matrix product with rows that are no multiples of 16 bytes, relative to one with such rows: cuBLAS has no
kernels for it that load through the tensor memory accelerator, and those of older GPUs load 8 bytes at a time."""
VIEW = 0.4  # host time of a view, relative to an operation that computes
UNITS = {
    torch.float32: "tf32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}
# Operations in fp8, none of which was measured yet, and the one whose samples serve instead, relative to its limit.
ALIKE = {
    "_scaled_mm": ("mm", "bfloat16"),
    "flexor::fp8_cast": ("_to_copy", "float32"),
    "flexor::fp8_maxima": ("_to_copy", "float32"),
}
KIND = "any of this kind"  # a kind may have the name of one of its operations
LAYOUTS: tuple[Layout, ...] = ("", "nhwc", "to nhwc")
GAP = 1e-6  # GPU seconds between two kernels of a CUDA graph, if it was not measured
REFERENCE = "speeds.json"  # shipped with Flexor: measured on the project's reference GPU

# Expected relative error of the step time without a calibration, if the GPU or the host is the bottleneck.
UNCALIBRATED_GPU, UNCALIBRATED_HOST = 0.25, 0.6


def limit(op: Op, gpu: GPU) -> float:
    """Minimum seconds of an operation, according to the data sheet."""
    seconds = max(KERNEL * op.kernels, (op.read + op.written) / gpu.bandwidth)
    if op.flops:
        seconds = max(seconds, op.flops / gpu.flops(UNITS.get(op.dtype, "fp32") if op.dtype else "fp32"))
    return seconds


def extents(op: Op) -> tuple[float, ...]:
    """The size of an operation, as log2 of its extents, to find similar ones of the same name."""
    sizes = op.extent or (op.read, op.written)
    return tuple(round(math.log2(max(1, size)), 2) for size in sizes)


class Sample(NamedTuple):
    """A measured operation."""

    name: str
    """The operation, and its memory format unless that is the usual one: `convolution nhwc`."""
    dtype: str
    extents: tuple[float, ...]
    times: float
    """Measured time divided by its limit."""


def sample_of(op: Op, seconds: float, gpu: GPU) -> Sample:
    return Sample(named(op.name, op.layout), _type(op), extents(op), round(seconds / limit(op, gpu), 3))


def named(name: str, layout: str) -> str:
    return f"{name} {layout}".strip()


def _type(op: Op) -> str:
    return str(op.dtype).removeprefix("torch.")


@dataclass(frozen=True, eq=False)
class Speeds:
    """What was measured on one machine."""

    gpu: str
    torch: str
    measured: str
    """The date."""
    samples: tuple[Sample, ...] = field(repr=False)
    host: dict[str, dict[str, float]]
    """Host seconds per common operation: by policy (and "any"), then by phase of a step. "step" is not a phase: it is
    the host time per step apart from operations."""
    spread_gpu: float = UNCALIBRATED_GPU
    """Largest relative error for whole steps with the GPU as the bottleneck."""
    spread_host: float = UNCALIBRATED_HOST
    """The same with the host as the bottleneck."""
    gap: float = GAP
    """GPU seconds between two kernels of a CUDA graph."""
    elsewhere: bool = False
    """Measured on another machine, so the host differs even if the GPU is the same."""

    def launch_s(self, op: Op, policy: str) -> float:
        """Host seconds to launch the operation."""
        phases = self.host.get(policy, self.host["any"])
        return phases.get(op.phase, phases["optimizer"]) * (VIEW if op.kind == "view" else op.host)

    def step_overhead_s(self, policy: str) -> float:
        """Host seconds per step apart from operations."""
        return self.host.get(policy, self.host["any"])["step"]

    def times(self, op: Op) -> float:
        """The operation's time relative to its limit."""
        key = (op.name, op.layout, op.detail, op.kernels == 1, _type(op), extents(op))
        if key not in self._cache:
            self._cache[key] = self._interpolated(op, np.array(key[-1]))
        return self._cache[key]

    def _interpolated(self, op: Op, point: np.ndarray) -> float:
        slower = UNALIGNED if op.detail == UNALIGNED_ROWS else 1.0
        for key in _keys(op):
            points, times = self._groups.get(key, (np.empty((0, 0)), np.empty(0)))
            if points.shape[1] == len(point):
                return slower * _nearest(points, times, point, op)[0]
        return self._like_others(op, point) if op.kind == "memory" else slower

    def _like_others(self, op: Op, point: np.ndarray) -> float:
        """A memory operation that was not measured: the median of those that are most similar, one of each name."""
        groups = [g for key, g in self._groups.items() if key[0] is not KIND and key[1:] == (_type(op),)]
        if not groups:
            groups = [group for key, group in self._groups.items() if key[0] is not KIND and len(key) == 1]
        similar = [_nearest(*group, point, op) for group in groups if group[0].shape[1] == len(point)]
        similar.sort(key=lambda each: each[1])
        return float(np.median([times for times, _ in similar[:NAMES]])) if similar else 1.0

    @functools.cached_property
    def _cache(self) -> dict[tuple, float]:
        return {}

    @functools.cached_property
    def _groups(self) -> dict[tuple, tuple[np.ndarray, np.ndarray]]:
        """Extents and relative times of the samples, grouped by name and type, name, kind and type, and kind."""
        groups: dict[tuple, list[Sample]] = defaultdict(list)
        for sample in self.samples:
            for key in ((sample.name,), (KIND, kind_of(sample))):
                groups[key].append(sample)
                groups[*key, sample.dtype].append(sample)
        return {
            key: (np.array([s.extents for s in group]), np.array([s.times for s in group]))
            for key, group in groups.items()
            if len({len(s.extents) for s in group}) == 1
        }


def _nearest(points: np.ndarray, times: np.ndarray, point: np.ndarray, op: Op) -> tuple[float, float]:
    """The relative time at a point, interpolated between the nearest samples, and the distance of the nearest."""
    if op.kind == "memory":
        largest = SATURATED if op.kernels == 1 else math.inf
        points, point = _by_ratio(points, largest), _by_ratio(point, largest)
    difference = points - point
    if op.kind == "convolution":
        difference = difference * (POSITIONS, 1, 1)
    distance = (difference**2).sum(1)
    nearest = np.argsort(distance, kind="stable")[:NEIGHBOURS]
    weight = 1 / (distance[nearest] + BLUR)
    return float(np.exp((weight * np.log(times[nearest])).sum() / weight.sum())), float(distance[nearest[0]])


def _by_ratio(extents: np.ndarray, largest: float) -> np.ndarray:
    """log2 of bytes read and written as log2 of their sum and their ratio."""
    read, written = extents[..., 0], extents[..., 1]
    total = np.minimum(np.logaddexp2(read, written), largest)
    return np.stack([total, RATIO * (read - written)], -1)


def _keys(op: Op) -> Iterator[tuple[str, ...]]:
    """Where to look for samples like an operation: in its own memory format first, then in others."""
    names = [named(op.name, layout) for layout in sorted(LAYOUTS, key=lambda each: each != op.layout)]
    yield from ((name, _type(op)) for name in names)
    yield from ((name,) for name in names)
    if op.name in ALIKE:
        yield ALIKE[op.name]
    if op.kind != "memory":
        yield from ((KIND, op.kind, _type(op)), (KIND, op.kind))


def kind_of(sample: Sample) -> str:
    """The kind of its operation, found from the number of extents."""
    return {2: "memory", 3: "convolution", 4: "matmul", 5: "attention"}[len(sample.extents)]


@functools.cache
def assumed() -> Speeds:
    """The shipped speeds, for machines without a calibration. Always the same object: it caches its interpolations."""
    shipped = _parse(json.loads(resources.files("flexor.plan.speed").joinpath(REFERENCE).read_text()))
    return replace(shipped, elsewhere=True)


def file_of(gpu: GPU) -> Path:
    return cache_folder() / "speeds" / f"{gpu.name.replace(' ', '_')}.json"


def save(speeds: Speeds, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(speeds))


def to_json(speeds: Speeds) -> str:
    """As JSON, with one sample per line."""
    plain = asdict(speeds)
    samples = ",\n".join(json.dumps(sample) for sample in plain.pop("samples"))
    return json.dumps({**plain, "samples": "?"}, indent=1).replace('"?"', f"[\n{samples}\n]") + "\n"


def load(gpu: GPU) -> Speeds | None:
    """The calibration of this GPU by `flexor plan --calibrate` on this machine; None without one."""
    path = file_of(gpu)
    return read(path) if path.is_file() else None


def read(path: Path) -> Speeds:
    try:
        return _parse(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"Can't read the calibration {path} ({error}). Run `flexor plan --calibrate` again."
        ) from error


def _parse(plain: dict[str, Any]) -> Speeds:
    samples = tuple(Sample(n, d, tuple(e), t) for n, d, e, t in plain.pop("samples"))
    return Speeds(**plain, samples=samples)
