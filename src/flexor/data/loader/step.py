"""The data of a training step, and the frames it shares with other steps."""

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
    """The last step that reads any of its frames."""
    slots: dict[str, dict[int, Slot]] = field(default_factory=dict)
    """The planes of each frame, while it is still needed."""
    bad: dict[str, dict[int, str]] = field(default_factory=dict)
    """Frames that can't be decoded, and why."""
    pending: int = 0
    """Cameras that are not decoded yet."""
    steps: list[Step] = field(default_factory=list)
    """Steps that wait for this piece."""
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
class Step(Generic[T]):
    """What one rank reads at one optimizer step."""

    number: int
    rows: np.ndarray  # [b]
    ids: dict[str, np.ndarray]  # per camera, frames of each sample's window [b, T]
    pieces: list[Piece | None]  # [b] the piece with a sample's frames; None: all are cached
    waits: list[Piece] = field(default_factory=list)
    """Pieces whose frames will be cached when this step is assembled; the step reads them from the cache."""
    images: dict[str, list[Any]] = field(default_factory=dict)
    """Per camera, one entry for each micro-batch."""
    result: Future[T] = field(default_factory=Future)
    pending: int = 0
    """Number of pieces that are not decoded yet."""
    processing: WorkClock = NO_WORK
    """Time spent in host steps."""


@dataclass
class RemainingUnit:
    """The remaining samples of one unit: their frames per camera, each with the step that reads it."""

    ids: dict[str, np.ndarray]  # [n, T]
    last: int


class StepPlanner:
    """Defines what each step reads. `Loader` implements it."""

    cameras: list[str]

    def plan(self, step: int) -> tuple[np.ndarray, dict[str, np.ndarray], list[tuple | None]]:
        """Rows [b], frames per camera [b, T], and the unit of each sample; None for no unit."""
        raise NotImplementedError

    def unit(self, key: tuple, step: int) -> RemainingUnit:
        """The samples of a unit from this step on."""
        raise NotImplementedError
