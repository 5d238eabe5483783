"""The data of a few training steps, and the frames they share with others."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from flexor.data.loader.frame_sets import FrameSets
from flexor.data.loader.work_time import NO_WORK, WorkClock

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """What one rank reads at a few successive optimizer steps, one after the other."""

    rows: np.ndarray  # [b] of all steps, of each as many
    ids: dict[str, np.ndarray]  # per camera, frames of each sample's window [b, T]
    units: np.ndarray  # [b] the unit of each sample; -1: none


@dataclass(frozen=True, eq=False)
class RemainingUnits:
    """The frames of some units that are still to be read."""

    frames: dict[str, FrameSets]  # per camera, a set for each unit
    last: np.ndarray  # [N] the last group that reads any

    def __len__(self) -> int:
        return len(self.last)

    def __getitem__(self, units: slice) -> RemainingUnits:
        frames = {camera: sets[units] for camera, sets in self.frames.items()}
        return RemainingUnits(frames, self.last[units])


@dataclass(eq=False)
class StepGroup(Generic[T]):
    """The group of steps on its way into batches."""

    number: int
    steps: range
    rows: np.ndarray  # as planned
    ids: dict[str, np.ndarray]
    pieces: np.ndarray  # [b] the piece that has the sample's frames; -1: all are cached
    waits: bool = False
    """Whether it reads frames from the cache that were not there when it was planned."""
    slots: dict[str, np.ndarray] = field(default_factory=dict)
    """Per camera, the slots of decoded frames [b, T], when all are there; -1 for others."""
    images: dict[str, list[Any]] = field(default_factory=dict)
    """Per camera, one entry for each micro-batch of each step."""
    result: Future[T] = field(default_factory=Future)
    pending: int = 0
    """Requests that are not answered yet. Groups are assembled in order: what it shares with earlier ones is there."""
    error: BaseException | None = None
    """Of one of the requests."""
    processing: WorkClock = NO_WORK
    """Time spent in host steps."""


class StepPlanner:
    """Defines what each group of steps reads."""

    cameras: list[str]

    def steps_of(self, number: int) -> range:
        """The optimizer steps of a group."""
        raise NotImplementedError

    def plan(self, number: int) -> GroupPlan:
        """What a group reads."""
        raise NotImplementedError

    def units(self, units: np.ndarray, number: int) -> RemainingUnits:
        """What this group and later ones read of some of its units [N]."""
        raise NotImplementedError
