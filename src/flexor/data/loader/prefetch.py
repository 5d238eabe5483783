"""Prefetches the frames of training steps: plans ahead, decodes each frame once, and releases it after use.

Small steps are handled in groups: a group costs the interpreter little more than a step. The feed runs ahead of the
training loop. It decodes units (see `order/decode_units.py`) in the order in which they are first needed, while the
pool has room, and assembles groups one after the other. If a group's frames have no room although all earlier groups
are done, it decodes only what it needs. So memory is limited to the pool plus one group, for any dataset.

What units and frames need is done by numpy for all of a group: one by one, it would take as long as decoding.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping
from functools import partial
from itertools import repeat
from typing import Generic

import numpy as np

from flexor.data.frames.decode_processes import DecodeProcesses
from flexor.data.frames.store import FrameStore
from flexor.data.loader.decoded_frames import DecodedFrames
from flexor.data.loader.frame_decoder import FrameDecoder
from flexor.data.loader.frame_sets import FrameSets
from flexor.data.loader.step import RemainingUnits, StepGroup, StepPlanner, T
from flexor.data.loader.threads import ReaderThreads
from flexor.data.loader.work_time import WorkClock, count_seconds, work_clock

NO_UNIT = -1


class Prefetcher(Generic[T]):
    """Runs the groups of a planner in threads."""

    def __init__(
        self,
        planner: StepPlanner,
        store: FrameStore,
        frames: DecodedFrames,
        assemble: Callable[[StepGroup[T]], list[Callable[[], None]]],
        finish: Callable[[StepGroup[T]], T],
        *,
        threads: int,
        prefetch: int,
        ahead: int,
        counters: Counter[str],
        processes: DecodeProcesses | None = None,
    ):
        """`assemble(group)` returns the jobs that fill its batches; `finish(group)` returns the batches after them.
        `prefetch`: groups that are assembled ahead of the loop; `ahead`: those planned, if the pool has room.
        `processes` decode videos, into the pool's memory.
        """
        self.planner, self.store, self.frames, self.pool = planner, store, frames, frames.pool
        self.assemble, self.finish = assemble, finish
        self.threads, self.prefetch, self.ahead = threads, max(1, prefetch), ahead
        self.counters = counters
        self.processes = processes
        self.pieces: dict[int, int] = {}  # of units that have room
        self.next_piece = 0
        # units and their pieces, by the last group that reads them
        self.ending: dict[int, list[tuple[int, int]]] = {}
        self.planned: deque[StepGroup[T]] = deque()
        self.outstanding: set[int] = set()
        self.next_group = 0
        self.closing = False
        self.failure: BaseException | None = None
        self.changed = threading.Condition(threading.RLock())

    def groups(self, count: int) -> Generator[T]:
        """What groups 0 ... count - 1 become."""
        self.reader_threads = ReaderThreads(self.threads, "loader")
        self.decoder = FrameDecoder(
            self.store,
            self.frames,
            self.reader_threads,
            self.processes,
            self.planner.cameras,
            counters=self.counters,
            changed=self.changed,
            decoded=self._advance,
        )
        groups: deque[StepGroup[T]] = deque()
        planner_thread = None
        if self.threads:
            planner_thread = threading.Thread(
                target=self._plan_groups, args=(count, groups), name="loader-plan", daemon=True
            )
            planner_thread.start()
        try:
            for number in range(count):
                if planner_thread is None:
                    self._add(self._plan(number), groups)
                yield self._take(groups)
        finally:
            with self.changed:
                self.closing = True
                self.changed.notify_all()
            self.reader_threads.close()
            if planner_thread:
                planner_thread.join()
            if self.processes is not None:
                self.processes.close()

    def _take(self, groups: deque[StepGroup[T]]) -> T:
        with self.changed:
            while not groups and self.failure is None:
                self.changed.wait()
            if not groups:
                assert self.failure is not None
                raise self.failure
            group = groups.popleft()
        result = group.result.result()
        with self.changed:
            self.next_group = group.number + 1
        self._advance()
        return result

    def _plan_groups(self, count: int, groups: deque[StepGroup[T]]) -> None:
        try:
            for number in range(count):
                with self.changed:
                    self.changed.wait_for(lambda: len(self.outstanding) < self.ahead or self.closing)
                started = work_clock()
                group = self._plan(number)
                if group is None:
                    return
                with self.changed:
                    count_seconds(self.counters, plan_cpu_s=work_clock().since(started).cpu)
                self._add(group, groups)
        except BaseException as error:
            with self.changed:
                self.failure = error
                self.changed.notify_all()

    def _add(self, group: StepGroup[T] | None, groups: deque[StepGroup[T]]) -> None:
        assert group is not None
        with self.changed:
            self.planned.append(group)
            self.outstanding.add(group.number)
            groups.append(group)
            self.changed.notify_all()
        self._advance()

    # Planning: which frames a group needs, and where they will be.

    def _plan(self, number: int) -> StepGroup[T] | None:
        """The group, with its frames submitted for decoding; None if the feed closes in the meantime."""
        plan = self.planner.plan(number)
        group = StepGroup[T](
            number, self.planner.steps_of(number), plan.rows, plan.ids, self._pieces_of(plan.units)
        )
        missing = ~self._cached(plan.ids, len(plan.rows))
        cached = len(plan.rows) - int(missing.sum())
        self.counters["cached"] += cached * sum(frames.shape[1] for frames in plan.ids.values())
        new = missing & (group.pieces < 0) & (plan.units != NO_UNIT)
        if new.any():
            self._open_units(distinct_in_order(plan.units[new]), group)
            group.pieces = self._pieces_of(plan.units)
        single = np.flatnonzero(missing & (group.pieces < 0))
        if len(single) and not self.closing:
            self._read_single_samples(single, group)
        return None if self.closing else group

    def _pieces_of(self, units: np.ndarray) -> np.ndarray:
        """The pieces of units; -1 for those without room, and for no unit."""
        return np.fromiter(map(self.pieces.get, units.tolist(), repeat(-1)), np.int64, len(units))

    def _cached(self, ids: Mapping[str, np.ndarray], count: int) -> np.ndarray:
        """Which samples have all their frames in a cache: they need no piece."""
        cached = np.ones(count, bool)
        for camera, frames in ids.items():
            cached &= self.store.is_cached(camera, frames.ravel()).reshape(frames.shape).all(axis=1)
        return cached

    def _open_units(self, units: np.ndarray, group: StepGroup[T]) -> None:
        """Decode units as soon as there is room for them. Those for which there will be none stay closed."""
        remaining = self.planner.units(units, group.number)
        if self.store.caches:
            frames = {
                camera: sets.only(~self.store.is_cached(camera, sets.ids))
                for camera, sets in remaining.frames.items()
            }
            remaining = RemainingUnits(frames, remaining.last)
        self._start(units, remaining, group)

    def _read_single_samples(self, samples: np.ndarray, group: StepGroup[T]) -> None:
        """Decode the frames of some samples that are neither cached nor about to be, each sample for itself."""
        frames, needed = {}, np.zeros(len(samples), bool)
        for camera, windows in group.ids.items():
            ids, expected = windows[samples].ravel(), self.decoder.expected[camera]
            pending = np.array([frame in expected for frame in ids.tolist()], bool)
            group.waits |= bool(pending.any())
            missing = ~pending & ~self.store.is_cached(camera, ids)
            sample = np.repeat(np.arange(len(samples)), windows.shape[1])[missing]
            frames[camera] = FrameSets.of(ids[missing], sample, len(samples))
            needed |= frames[camera].counts > 0
        frames = {camera: sets.take(np.flatnonzero(needed)) for camera, sets in frames.items()}
        self.counters["misses"] += sum(len(sets.ids) for sets in frames.values())
        count = int(needed.sum())
        units = RemainingUnits(frames, np.full(count, group.number))
        group.pieces[samples[needed]] = self._start(np.full(count, NO_UNIT), units, group, force=True)

    def _start(
        self, keys: np.ndarray, units: RemainingUnits, group: StepGroup[T], force: bool = False
    ) -> np.ndarray:
        """Decode units as soon as there is room for them. Returns their pieces [N]; -1 for those that will have no
        room, because no earlier group will free any. With `force` they are decoded nevertheless."""
        pieces, first = np.full(len(units), -1), 0
        nbytes = np.cumsum(self.frames.nbytes(units))
        while first < len(units):
            before = nbytes[first - 1] if first else 0
            count = self._wait_for_room(nbytes[first:] - before)
            if self.closing:
                break
            fits = count > 0
            part = slice(first, first + max(1, count))
            if fits or force:
                pieces[part] = self._start_now(keys[part], units[part], group, force=not fits)
            first = part.stop
        return pieces

    def _wait_for_room(self, nbytes: np.ndarray) -> int:
        """How many units fit into the pool, of those that need so many bytes with all before them; 0: not one, and no
        earlier group will free room."""
        with self.changed:
            while not (count := int(np.searchsorted(nbytes, self.pool.room, side="right"))):
                if not self.outstanding or self.closing:
                    break
                started = time.perf_counter()
                self.changed.wait()
                count_seconds(self.counters, wait_slots_s=time.perf_counter() - started)
            return count

    def _start_now(
        self, keys: np.ndarray, units: RemainingUnits, group: StepGroup[T], force: bool
    ) -> np.ndarray:
        """Give slots to units, and submit them for decoding. Returns their pieces."""
        pieces = np.arange(self.next_piece, self.next_piece + len(units))
        self.next_piece += len(units)
        slots = self.frames.add(units, pieces, force)
        assert slots is not None, "there is room"
        numbers = pieces.tolist()
        self.pieces.update(zip(keys.tolist(), numbers))
        self.pieces.pop(NO_UNIT, None)
        with self.changed:
            for last, *unit in zip(units.last.tolist(), keys.tolist(), numbers):
                self.ending.setdefault(last, []).append(tuple(unit))
        self.decoder.submit(group, units, pieces, slots)
        return pieces

    # Assembling: in order, at most `prefetch` groups ahead of the loop.

    def _advance(self) -> None:
        with self.changed:
            due = []
            for group in self.planned:
                if group.number >= self.next_group + self.prefetch or group.pending:
                    break
                due.append(group)
            for _ in due:
                self.planned.popleft()
        for group in due:  # by a reader thread: the loop has other work to do
            self.reader_threads.submit((group.number, 0), partial(self._assemble, group))

    def _assemble(self, group: StepGroup[T]) -> None:
        started = work_clock()
        try:
            if group.error is not None:
                raise group.error
            for camera, ids in group.ids.items():
                group.slots[camera] = self.frames.find(camera, group.pieces[:, None], ids)
            jobs = self.assemble(group)
        except BaseException as error:
            group.result.set_exception(error)
            return
        self._count(work_clock().since(started))
        jobs_left = [len(jobs)]

        def run(job: Callable[[], None]) -> None:
            started = work_clock()
            try:
                job()
            except BaseException as error:
                if not group.result.done():
                    group.result.set_exception(error)
            self._count(work_clock().since(started), "convert")
            with self.changed:
                jobs_left[0] -= 1
                last = jobs_left[0] == 0
            if last and not group.result.done():
                self._complete(group)

        for job in jobs[1:]:
            self.reader_threads.submit((group.number, 0), partial(run, job))
        run(jobs[0])

    def _count(self, work: WorkClock, job: str | None = None) -> None:
        with self.changed:
            count_seconds(self.counters, assemble_s=work.wall, assemble_cpu_s=work.cpu)
            if job is not None:
                self.counters[f"{job}_us"] += round(1e6 * work.cpu)

    def _complete(self, group: StepGroup[T]) -> None:
        started = work_clock()
        try:
            result = self.finish(group)
        except BaseException as error:
            group.result.set_exception(error)
            return
        self._count(work_clock().since(started).since(group.processing))
        with self.changed:
            count_seconds(self.counters, host_steps_s=group.processing.wall)
        self._release(group)
        group.result.set_result(result)

    def _release(self, group: StepGroup[T]) -> None:
        """Release frames that no later sample reads."""
        for camera, ids in group.ids.items():
            self.frames.read(camera, group.pieces[:, None], ids)
        with self.changed:
            self.outstanding.remove(group.number)
            oldest = min(self.outstanding, default=group.number + 1)
            for last in [last for last in self.ending if last < oldest]:
                units, pieces = zip(*self.ending.pop(last))
                for unit in units:
                    self.pieces.pop(unit, None)
                # another rank reads the rest of them
                self.counters["evictions"] += self.frames.remove(np.array(pieces))
            self.changed.notify_all()


def distinct_in_order(values: np.ndarray) -> np.ndarray:
    """The distinct values, in the order of their first occurrence."""
    _, first = np.unique(values, return_index=True)
    first.sort()
    return values[first]
