"""The data of a few training steps, and the frames they share with others."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from flexor.data.loader.work_time import NO_WORK, WorkClock

T = TypeVar("T")


@dataclass(eq=False)
class Piece:
    """Frames of one unit while they are needed. Per camera:"""

    number: int
    """Later pieces have higher numbers."""
    ids: dict[str, np.ndarray]
    """Distinct and ascending: frames that are not cached and must be decoded."""
    uses: dict[str, np.ndarray]
    """How often each frame will be read."""
    last: int
    """The last group of steps that reads any of its frames."""
    slots: dict[str, np.ndarray] = field(default_factory=dict)
    """The numbers of the slots that its frames are decoded into."""
    bad: dict[str, dict[int, str]] = field(default_factory=dict)
    """Frames that can't be decoded, and why; only cameras that have any."""
    pending: int = 0
    """Cameras that are not decoded yet."""
    groups: list[StepGroup] = field(default_factory=list)
    """Those that wait for this piece."""
    error: BaseException | None = None


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
    slots: dict[str, np.ndarray] = field(default_factory=dict)
    """Per camera, the slots of decoded frames [b, T], when all are there; -1 for others."""
    images: dict[str, list[Any]] = field(default_factory=dict)
    """Per camera, one entry for each micro-batch of each step."""
    result: Future[T] = field(default_factory=Future)
    pending: int = 0
    """Number of pieces that are not decoded yet."""
    processing: WorkClock = NO_WORK
    """Time spent in host steps."""

    @cached_property
    def piece_numbers(self) -> np.ndarray:
        """Of each sample [b, 1]; -1: none."""
        return np.array([-1 if piece is None else piece.number for piece in self.pieces])[:, None]


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
