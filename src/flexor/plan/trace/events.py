"""The contents of a trace: allocations and releases of memory, and the operations of a step."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from flexor.data.frames.features import FeatureFormat
from flexor.plan.trace.cuda_on_meta import SyncPoint
from flexor.plan.trace.ops import Op

# `casts` are copies of weights in autocast's lower precision: it keeps them during a forward pass, or the run from step
# to step.
Category = Literal[
    "weights",
    "buffers",
    "casts",
    "gradients",
    "optimizer",
    "ema",
    "batch",
    "activations",
    "workspaces",
    "other",
]
EventKind = Literal["alloc", "free", "scratch"]


class Event(NamedTuple):
    """Memory is allocated, freed, or both within one operation (scratch)."""

    kind: EventKind
    storage: int
    nbytes: int
    op: int  # the operation during or before which it happens


def unfreed(events: Iterable[Event]) -> list[int]:
    """Storages that are allocated and not freed."""
    storages: dict[int, None] = {}
    for event in events:
        if event.kind == "alloc":
            storages[event.storage] = None
        elif event.kind == "free":
            storages.pop(event.storage, None)
    return list(storages)


class ReadyGradient(NamedTuple):
    """A parameter's gradient when the last backward pass of a step has computed it."""

    op: int
    """The last operation before it is ready."""
    nbytes: int
    dtype: torch.dtype
    exchanged_nbytes: int
    """In the type of the weights, in which it is exchanged."""
    exchanged_dtype: torch.dtype
    can_stay: bool
    """If it is a bucket of its own, it can be exchanged where it is."""
    storage: int | None
    """None if its memory is not tracked."""
    unit: int = 0
    """Index of what FSDP gathers together with this weight, in `Trace.units`."""

    @property
    def numel(self) -> int:
        return self.nbytes // self.dtype.itemsize


@dataclass
class StepEvents:
    """The events of one optimizer step: `start` to `loaded` copies its batches to the GPU, the rest computes."""

    number: int
    start: int
    loaded: int = 0
    end: int = 0
    graph_key: Hashable | None = "step"
    """Steps with the same key can be replayed as one CUDA graph; None: they can't."""
    ready: tuple[ReadyGradient, ...] = ()
    """The gradients of its last backward pass, in the order in which they become ready."""


class UnitSize(NamedTuple):
    """What FSDP gathers together."""

    parameters: int
    trained: int
    nbytes: int
    """Of all parameters, as they are stored."""
    trained_nbytes: int

    def gathered(self, half: bool) -> int:
        """Bytes of its weights, gathered on every GPU; in half precision they take two bytes each."""
        return min(self.nbytes, 2 * self.parameters) if half else self.nbytes

    def gradients(self, half: bool) -> int:
        """Bytes of its gradients before they are reduced."""
        return min(self.trained_nbytes, 2 * self.trained) if half else self.trained_nbytes


@dataclass(frozen=True)
class SavedWeights:
    """Bytes of the weights in a checkpoint, each in a file of its own."""

    raw: int = 0
    """As they are trained: parameters, buffers and adapters."""
    average: int = 0
    """The moving average; 0 if there is none."""
    exported: int = 0
    """For inference, as LeRobot's file has them: adapters are merged, and there may be weights without any use."""
    adapters: int = 0
    """Adapters beside the merged weights; 0 if there are none, or nothing that they can be added to."""


@dataclass(eq=False)
class Trace:
    events: list[Event]
    ops: list[Op]
    category: dict[int, Category]
    built: int
    """The events before this index build the policy, once."""
    steps: list[StepEvents]
    """The first step, and the last one if the policy is trained in phases."""
    batch_size: int
    accumulation: int
    """Passes per step; all their batches are on the GPU at the same time."""
    passes: int
    """Passes in the trace: all passes after the second repeat it."""
    parameters: int
    trained: int
    units: list[UnitSize]
    """What FSDP would gather together. The rest of the policy comes last."""
    gradients: int = 0
    """Bytes of all gradients."""
    inputs: tuple[int, ...] = ()
    """Bytes of each tensor of one pass's batch, of which a CUDA graph has a copy."""
    saved: SavedWeights = SavedWeights()
    float32_on_host: tuple[int, ...] = ()
    """Bytes of each frozen weight in host memory. The GPU has it in bfloat16 (`policies/frozen_in_bf16.py`)."""
    attention: dict[tuple, str] = field(default_factory=dict)
    sync_points: list[SyncPoint] = field(default_factory=list)
    """Where a step waits for the GPU. Values that it read were assumed to be zero."""
    features: Mapping[str, FeatureFormat] = field(default_factory=dict)
    """What the step reads instead of images, by camera; empty if it reads images."""
    kept_by_graph: frozenset[int] = frozenset()
    """Storages that a captured step does not free."""

    @property
    def waits(self) -> tuple[str, ...]:
        """Where a policy of the user's own makes the host wait for the GPU, in every step.

        Built-in policies wait only in the first step (`tests/train/test_waiting.py`), so they are not listed.
        """
        flexor = str(Path(__file__).parents[2]) + os.sep
        return tuple(
            dict.fromkeys(str(p) for p in self.sync_points if p.file and not p.file.startswith(flexor))
        )

    def nbytes(self, category: Category) -> int:
        """Bytes allocated in a category, for memory that is never freed, such as weights; gradients: of one step."""
        return self._nbytes[category]

    @functools.cached_property
    def _nbytes(self) -> Counter[Category]:
        total: Counter[Category] = Counter()
        for event in self.events:
            if event.kind == "alloc":
                total[self.category[event.storage]] += event.nbytes
        return total
