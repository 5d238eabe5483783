"""What a step of training reads, and the frames it shares with other steps."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from flexor.data.frames.slots import Slot

T = TypeVar("T")


@dataclass(eq=False)
class Piece:
    """Frames of one unit while they are wanted. Per camera:"""

    ids: dict[str, np.ndarray]
    """Distinct and ascending: those that are kept nowhere else and must be decoded."""
    uses: dict[str, dict[int, int]]
    """How often each is still to be read."""
    last: int
    """The last step that reads any of it."""
    slots: dict[str, dict[int, Slot]] = field(default_factory=dict)
    """The planes of each, as long as it is to be read."""
    bad: dict[str, dict[int, str]] = field(default_factory=dict)
    """Those that do not decode, and why."""
    pending: int = 0
    """Cameras that are still to be decoded."""
    steps: list[Step] = field(default_factory=list)
    """Those that wait for it."""
    error: BaseException | None = None

    def find(self, camera: str, frame: int) -> Slot | None:
        """A frame's planes, if it is here."""
        return self.slots[camera].get(frame) if camera in self.slots else None

    def read(self, camera: str, frames: list[int]) -> list[Slot]:
        """Count these as read; returns the slots that nobody reads again."""
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
    pieces: list[Piece | None]  # [b] where a sample's frames are; None: all of them are kept
    waits: list[Piece] = field(default_factory=list)
    """Pieces whose frames will be kept by the time this step is assembled, and are read from there."""
    pictures: dict[str, list[Any]] = field(default_factory=dict)
    """Per camera, one for each micro-batch."""
    result: Future[T] = field(default_factory=Future)
    pending: int = 0
    """Pieces that are still to be decoded."""


@dataclass
class Wanted:
    """Samples of one unit from now on: their frames per camera, each with the step that reads it."""

    ids: dict[str, np.ndarray]  # [n, T]
    last: int


class Planner:
    """Says what each step reads. See `Loader`, which is one."""

    cameras: list[str]

    def plan(self, step: int) -> tuple[np.ndarray, dict[str, np.ndarray], list[tuple | None]]:
        """Rows [b], frames per camera [b, T], and the unit that each sample belongs to, None if to none."""
        raise NotImplementedError

    def unit(self, key: tuple, step: int) -> Wanted:
        """What is left of a unit from this step on."""
        raise NotImplementedError
