"""The data of a few training steps, and the frames they share with others."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from flexor.data.frames.slots import Slot
from flexor.data.loader.work_time import NO_WORK, WorkClock

T = TypeVar("T")


@dataclass(eq=False)
class Piece:
    """Frames of one unit while they are needed. Per camera:"""

    ids: dict[str, np.ndarray]
    """Distinct and ascending: frames that are not cached and must be decoded."""
    uses: dict[str, dict[int, int]]
    """How often each frame will still be read."""
    last: int
    """The last group of steps that reads any of its frames."""
    slots: dict[str, dict[int, Slot]] = field(default_factory=dict)
    """The planes of each frame, while it is still needed."""
    bad: dict[str, dict[int, str]] = field(default_factory=dict)
    """Frames that can't be decoded, and why."""
    pending: int = 0
    """Cameras that are not decoded yet."""
    groups: list[StepGroup] = field(default_factory=list)
    """Those that wait for this piece."""
    error: BaseException | None = None

    def find(self, camera: str, frame: int) -> Slot | None:
        """A frame's planes, if the piece has it."""
        return self.slots[camera].get(frame) if camera in self.slots else None

    def read(self, camera: str, frames: list[int]) -> list[Slot]:
        """Count these as read; returns the slots that will not be read again."""
        uses, slots, done = self.uses[camera], self.slots[camera], []
        for frame in frames:
            if frame in uses:
                uses[frame] -= 1
                if uses[frame] == 0:
                    done.append(slots.pop(frame))
        return done


@dataclass(eq=False)
class StepGroup(Generic[T]):
    """What one rank reads at a few successive optimizer steps, one after the other."""

    number: int
    steps: range
    rows: np.ndarray  # [b] of all steps, of each as many
    ids: dict[str, np.ndarray]  # per camera, frames of each sample's window [b, T]
    pieces: list[Piece | None]  # [b] the piece with a sample's frames; None: all are cached
    waits: list[Piece] = field(default_factory=list)
    """Pieces whose frames will be cached when this group is assembled; it reads them from the cache."""
    images: dict[str, list[Any]] = field(default_factory=dict)
    """Per camera, one entry for each micro-batch of each step."""
    result: Future[T] = field(default_factory=Future)
    pending: int = 0
    """Number of pieces that are not decoded yet."""
    processing: WorkClock = NO_WORK
    """Time spent in host steps."""


@dataclass
class RemainingUnit:
    """The remaining samples of one unit: their frames per camera, and the last group that reads any."""

    ids: dict[str, np.ndarray]  # [n, T]
    last: int


class StepPlanner:
    """Defines what each group of steps reads. `Loader` implements it."""

    cameras: list[str]

    def steps_of(self, number: int) -> range:
        """The optimizer steps of a group."""
        raise NotImplementedError

    def plan(self, number: int) -> tuple[np.ndarray, dict[str, np.ndarray], list[tuple | None]]:
        """Rows [b] of a group, frames per camera [b, T], and the unit of each sample; None for no unit."""
        raise NotImplementedError

    def unit(self, key: tuple, number: int) -> RemainingUnit:
        """The samples of a unit from this group on."""
        raise NotImplementedError
