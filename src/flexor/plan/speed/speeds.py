"""How fast a GPU really is, and the host that feeds it: operations that were timed, and what they say about others.

Data sheets give a limit: so many FLOPs and bytes per second, and no kernel takes less than a launch. How many times
that limit an operation takes depends on what it is and on its extents, so it is looked up among operations that were
timed: the nearest of the same name and type. On the GPU where they were timed that is interpolation. For another one
it is a guess, that kernels there miss their limit by as much.
"""

from __future__ import annotations

import functools
import json
import math
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from flexor.core.errors import ConfigError
from flexor.core.machine import cache_folder
from flexor.plan.site.hardware import GPU
from flexor.plan.trace.ops import Op

KERNEL = 2e-6  # seconds that the smallest kernel takes of a GPU
NEIGHBOURS = 3
BLUR = 0.1  # squared distance, in doublings of an extent, below which neighbours count alike
VIEW = 0.4  # what a view costs the host, in multiples of an operation that computes
UNITS = {torch.float32: "tf32", torch.bfloat16: "bf16", torch.float16: "fp16"}
REFERENCE = "speeds.json"  # shipped: those of the GPU that the project is measured on

# Relative error of a step's time to expect without a calibration: by the GPU's work, and by the host's.
UNCALIBRATED_GPU, UNCALIBRATED_HOST = 0.25, 0.6


def limit(op: Op, gpu: GPU) -> float:
    """Seconds that an operation takes at least, by the data sheet."""
    seconds = max(KERNEL * op.kernels, (op.read + op.written) / gpu.bandwidth)
    if op.flops:
        seconds = max(seconds, op.flops / gpu.flops(UNITS.get(op.dtype, "fp32") if op.dtype else "fp32"))
    return seconds


def extents(op: Op) -> tuple[float, ...]:
    """Where an operation is among others of its name, in doublings."""
    sizes = op.extent or (op.read, op.written)
    return tuple(round(math.log2(max(1, size)), 2) for size in sizes)


class Sample(NamedTuple):
    """An operation that was timed."""

    name: str
    dtype: str
    extents: tuple[float, ...]
    times: float
    """As long as its limit."""


def sample_of(op: Op, seconds: float, gpu: GPU) -> Sample:
    return Sample(op.name, _type(op), extents(op), round(seconds / limit(op, gpu), 3))


def _type(op: Op) -> str:
    return str(op.dtype).removeprefix("torch.")


@dataclass(frozen=True, eq=False)
class Speeds:
    """What was measured on one machine."""

    gpu: str
    torch: str
    measured: str
    """The day."""
    samples: tuple[Sample, ...] = field(repr=False)
    host: dict[str, dict[str, float]]
    """Seconds that the host takes for a common operation: by policy (and "any"), then by phase of a step. Beside the
    phases: "step", what it takes for a step apart from operations."""
    spread_gpu: float = UNCALIBRATED_GPU
    """Relative error seen in whole steps that the GPU bounds."""
    spread_host: float = UNCALIBRATED_HOST
    """In those that the host bounds."""
    elsewhere: bool = False
    """Measured on another machine: the host is another, whatever the GPU is."""

    def issue(self, op: Op, policy: str) -> float:
        """How long the host takes to issue it."""
        phases = self.host.get(policy, self.host["any"])
        return phases.get(op.phase, phases["optimizer"]) * (VIEW if op.kind == "view" else op.host)

    def around(self, policy: str) -> float:
        """How long the host takes for a step apart from operations."""
        return self.host.get(policy, self.host["any"])["step"]

    def times(self, op: Op) -> float:
        """How many times as long as its limit an operation takes."""
        at = (op.name, _type(op), extents(op))
        if at not in self._known:
            self._known[at] = self._looked_up(op, np.array(at[2]))
        return self._known[at]

    def _looked_up(self, op: Op, place: np.ndarray) -> float:
        for key in ((op.name, _type(op)), (op.name,), (op.kind, _type(op)), (op.kind,)):
            if key in self._by:
                places, times = self._by[key]
                if places.shape[1] == len(place):
                    break
        else:
            return 1.0
        distance = ((places - place) ** 2).sum(1)
        near = np.argsort(distance, kind="stable")[:NEIGHBOURS]
        weight = 1 / (distance[near] + BLUR)
        return float(np.exp((weight * np.log(times[near])).sum() / weight.sum()))

    @functools.cached_property
    def _known(self) -> dict[tuple, float]:
        return {}

    @functools.cached_property
    def _by(self) -> dict[tuple, tuple[np.ndarray, np.ndarray]]:
        """Places and times of the samples, by name and type, by name, by kind and type, by kind."""
        groups: dict[tuple, list[Sample]] = defaultdict(list)
        for sample in self.samples:
            kind = kind_of(sample)
            for key in ((sample.name, sample.dtype), (sample.name,), (kind, sample.dtype), (kind,)):
                groups[key].append(sample)
        return {
            key: (np.array([s.extents for s in some]), np.array([s.times for s in some]))
            for key, some in groups.items()
            if len({len(s.extents) for s in some}) == 1
        }


def kind_of(sample: Sample) -> str:
    """The kind of its operation, by how many extents that has."""
    return {2: "memory", 3: "convolution", 4: "matmul", 5: "attention"}[len(sample.extents)]


def assumed() -> Speeds:
    """What to go by where nothing was measured."""
    shipped = _parse(json.loads(resources.files("flexor.plan.speed").joinpath(REFERENCE).read_text()))
    return replace(shipped, elsewhere=True)


def file_of(gpu: GPU) -> Path:
    return cache_folder() / "speeds" / f"{gpu.name.replace(' ', '_')}.json"


def save(speeds: Speeds, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(speeds))


def to_json(speeds: Speeds) -> str:
    """A sample on each line."""
    plain = asdict(speeds)
    samples = ",\n".join(json.dumps(sample) for sample in plain.pop("samples"))
    return json.dumps({**plain, "samples": "?"}, indent=1).replace('"?"', f"[\n{samples}\n]") + "\n"


def load(gpu: GPU) -> Speeds | None:
    """What `flexor plan --calibrate` measured on this machine for such a GPU."""
    path = file_of(gpu)
    return read(path) if path.is_file() else None


def read(path: Path) -> Speeds:
    try:
        return _parse(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} can't be read ({error}): measure anew with `flexor plan --calibrate`."
        ) from error


def _parse(plain: dict[str, Any]) -> Speeds:
    samples = tuple(Sample(n, d, tuple(e), t) for n, d, e, t in plain.pop("samples"))
    return Speeds(**plain, samples=samples)
