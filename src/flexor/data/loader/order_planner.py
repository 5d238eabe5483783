"""Plans what each group of steps reads, many groups at once.

Looking up a few samples takes numpy as long as hundreds of them, and many groups are small. So groups are planned in
blocks: their samples, and the frames of the decode units that come up in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flexor.data.loader.frame_sets import FrameSets
from flexor.data.loader.step import GroupPlan, RemainingUnits, StepPlanner
from flexor.data.loader.step_groups import StepGroups
from flexor.data.order.order import SampleOrder, UnitSamples

__all__ = ["OrderPlanner"]

BLOCK_SAMPLES = 4096  # of all ranks, about


@dataclass(frozen=True, eq=False)
class _Block:
    """What one rank reads in some groups that follow each other."""

    steps: range
    plan: GroupPlan
    units: np.ndarray  # [N] those that come up for the first time, ascending
    groups: np.ndarray  # [N] in which group each does
    remaining: RemainingUnits


class OrderPlanner(StepPlanner):
    """Plans the steps of one rank, in ascending order of groups."""

    def __init__(
        self,
        order: SampleOrder,
        frames_of: Callable[[np.ndarray], dict[str, np.ndarray]],
        rows: np.ndarray,
        *,
        groups: StepGroups,
        rank: int,
        share: int,
        global_batch: int,
        cameras: list[str],
    ):
        """`rows` of the order's samples; `frames_of(rows)`: frames of each camera's windows [n, T]; `groups` of steps;
        the rank's `share` of each global batch."""
        self.order, self.frames_of, self.rows, self.cameras = order, frames_of, rows, cameras
        self.groups = groups
        self.rank, self.share, self.global_batch = rank, share, global_batch
        self._current: _Block | None = None
        self._last: dict[int, int] = {}  # of units in use, the last group that reads each

    def steps_of(self, number: int) -> range:
        return self.groups.of(number)

    def plan(self, number: int) -> GroupPlan:
        block, steps = self._block(number), self.steps_of(number)
        first, stop = ((step - block.steps.start) * self.share for step in (steps.start, steps.stop))
        plan, samples = block.plan, slice(first, stop)
        ids = {camera: frames[samples] for camera, frames in plan.ids.items()}
        return GroupPlan(plan.rows[samples], ids, plan.units[samples])

    def units(self, units: np.ndarray, number: int) -> RemainingUnits:
        block = self._block(number)
        places = np.searchsorted(block.units, units)
        places[places == len(block.units)] = 0
        if (
            not len(block.units)
            or (block.units[places] != units).any()
            or (block.groups[places] != number).any()
        ):
            return self._late(units, number)
        frames = {camera: sets.take(places) for camera, sets in block.remaining.frames.items()}
        return RemainingUnits(frames, block.remaining.last[places])

    def _late(self, units: np.ndarray, number: int) -> RemainingUnits:
        """Units for which there was no room when they came up."""
        ascending = np.sort(units)
        remaining = self._remaining(ascending, np.full(len(units), number))
        order = np.searchsorted(ascending, units)
        frames = {camera: sets.take(order) for camera, sets in remaining.frames.items()}
        return RemainingUnits(frames, remaining.last[order])

    def _block(self, number: int) -> _Block:
        """The block of a group."""
        if self._current is None or self.groups.of(number).start not in self._current.steps:
            self._current = self._look_up(number)
        return self._current

    def _look_up(self, first: int) -> _Block:
        steps, number = self.groups.of(first), first + 1
        while len(steps) * self.global_batch < BLOCK_SAMPLES and (following := self.groups.of(number)):
            steps, number = range(steps.start, following.stop), number + 1
        selection = self.order.select(steps.start * self.global_batch, self.global_batch, len(steps))
        mine = slice(self.rank * self.share, (self.rank + 1) * self.share)
        sample, epoch, unit = (
            column.reshape(len(steps), -1)[:, mine].ravel()
            for column in (selection.sample, selection.epoch, selection.unit)
        )
        rows = self.rows[sample]
        keys = (
            np.where(unit >= 0, epoch * self.order.pieces + unit, -1)
            if self.cameras
            else np.full(len(rows), -1)
        )
        units, groups = self._new(keys, steps, first)
        plan = GroupPlan(rows, self.frames_of(rows), keys)
        return _Block(steps, plan, units, groups, self._remaining(units, groups))

    def _new(self, keys: np.ndarray, steps: range, first_group: int) -> tuple[np.ndarray, np.ndarray]:
        """The units that no earlier group has, ascending, and the first group of each."""
        self._last = {unit: last for unit, last in self._last.items() if last >= first_group}
        units, first = np.unique(keys, return_index=True)
        new = np.array([unit >= 0 and unit not in self._last for unit in units.tolist()], bool)
        return units[new], self.groups.number_of(steps.start + first[new] // self.share)

    def _remaining(self, units: np.ndarray, groups: np.ndarray) -> RemainingUnits:
        """What groups[k] and later ones read of units[k]; both [N]."""
        if not len(units):
            none = np.arange(0)
            return RemainingUnits({c: FrameSets(none, none, np.zeros(1, int)) for c in self.cameras}, none)
        samples = self._samples_of(units)
        unit = np.repeat(np.arange(len(units)), np.diff(samples.edges))
        group = self.groups.number_of(samples.position // self.global_batch)
        later = group >= groups[unit]  # what comes before was read, maybe by an earlier run
        last = np.maximum.reduceat(group, samples.edges[:-1])
        self._last.update(zip(units.tolist(), last.tolist()))
        unit = unit[later]
        frames = {}
        for camera, window in self.frames_of(self.rows[samples.sample[later]]).items():
            frames[camera] = FrameSets.of(window.ravel(), np.repeat(unit, window.shape[1]), len(units))
        return RemainingUnits(frames, last)

    def _samples_of(self, units: np.ndarray) -> UnitSamples:
        epoch, piece = np.divmod(units, self.order.pieces)
        epochs, first = np.unique(epoch, return_index=True)
        pieces = np.split(piece, first[1:])
        return UnitSamples.join(
            [self.order.samples_of(e, of_epoch) for e, of_epoch in zip(epochs.tolist(), pieces)]
        )
