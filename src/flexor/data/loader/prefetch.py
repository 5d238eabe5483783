"""Prefetches the frames of each step: plans ahead, decodes each frame once, and releases it after use.

A *piece* is the frames of one unit (see `order/decode_units.py`) while some of its samples are still to come. The
feed runs ahead of the training loop. It decodes pieces in the order in which they are first needed, while the
pool has room, and assembles steps one after the other. If a step's frames have no room although all earlier steps
are done, it decodes only what it needs. So memory is limited to the pool plus one step, for any dataset.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any, Generic

import numpy as np

from flexor.core.errors import DatasetError, SourceError
from flexor.data.frames.slots import Pool, Slot
from flexor.data.frames.store import FrameStore
from flexor.data.loader.step import Piece, Step, StepPlanner, T
from flexor.data.loader.threads import ReaderThreads
from flexor.data.loader.work_time import WorkClock, count_seconds, work_clock

AHEAD = 64  # steps that are planned ahead, if the pool has room
GROUP = 32  # approximate number of frames of all cameras that are decoded with one request


class Prefetcher(Generic[T]):
    """Runs the steps of a planner in threads."""

    def __init__(
        self,
        planner: StepPlanner,
        store: FrameStore,
        pool: Pool,
        assemble: Callable[[Step[T]], list[Callable[[], None]]],
        finish: Callable[[Step[T]], T],
        *,
        threads: int,
        prefetch: int,
        counters: Counter[str],
    ):
        """`assemble(step)` returns the jobs that fill a batch; `finish(step)` returns the batch after them."""
        self.planner, self.store, self.pool = planner, store, pool
        self.assemble, self.finish = assemble, finish
        self.threads, self.prefetch, self.counters = threads, max(1, prefetch), counters
        self.pieces: dict[tuple, Piece] = {}
        self.group: list[Piece] = []  # planned, to be decoded together
        self.group_step = 0
        self.pending_frames: dict[tuple[str, int], Piece] = {}  # frames that will be cached, by camera and id
        self.planned: deque[Step[T]] = deque()
        self.outstanding: set[int] = set()
        self.next_step = 0
        self.closing = False
        self.failure: BaseException | None = None
        self.changed = threading.Condition(threading.RLock())

    def steps(self, start: int, stop: int) -> Generator[T]:
        self.next_step = start
        self.reader_threads = ReaderThreads(self.threads, "loader")
        steps: deque[Step[T]] = deque()
        planner_thread = None
        if self.threads:
            planner_thread = threading.Thread(
                target=self._plan_steps, args=(start, stop, steps), name="loader-plan", daemon=True
            )
            planner_thread.start()
        try:
            for number in range(start, stop):
                if planner_thread is None:
                    self._add(self._plan(number), steps)
                yield self._take(steps)
        finally:
            with self.changed:
                self.closing = True
                self.changed.notify_all()
            self.reader_threads.close()
            if planner_thread:
                planner_thread.join()

    def _take(self, steps: deque[Step[T]]) -> T:
        with self.changed:
            while not steps and self.failure is None:
                self.changed.wait()
            if not steps:
                assert self.failure is not None
                raise self.failure
            step = steps.popleft()
        result = step.result.result()
        with self.changed:
            self.next_step = step.number + 1
        self._advance()
        return result

    def _plan_steps(self, start: int, stop: int, steps: deque[Step[T]]) -> None:
        try:
            for number in range(start, stop):
                with self.changed:
                    self.changed.wait_for(lambda: len(self.outstanding) < AHEAD or self.closing)
                step = self._plan(number)
                if step is None:
                    return
                self._add(step, steps)
        except BaseException as error:
            with self.changed:
                self.failure = error
                self.changed.notify_all()

    def _add(self, step: Step[T] | None, steps: deque[Step[T]]) -> None:
        assert step is not None
        with self.changed:
            for piece in {*step.pieces, *step.waits} - {None}:
                if piece.pending:  # type: ignore[union-attr]
                    piece.steps.append(step)  # type: ignore[union-attr]
                    step.pending += 1
            self.planned.append(step)
            self.outstanding.add(step.number)
            steps.append(step)
            self.changed.notify_all()
        self._advance()

    # Planning: which frames a step needs, and where they will be.

    def _plan(self, number: int) -> Step[T] | None:
        """The step, with its pieces submitted for decoding; None if the feed closes in the meantime."""
        rows, ids, units = self.planner.plan(number)
        cached = self._cached(ids, len(rows))
        pieces: list[Piece | None] = []
        waits: list[Piece] = []
        for i, key in enumerate(units):
            piece = self.pieces.get(key) if key is not None else None
            if piece is None and not cached[i]:
                piece = self._open_unit(key, number) if key is not None else None
                if piece is None:
                    sample = {camera: frames[i] for camera, frames in ids.items()}
                    piece = self._single_sample(sample, number, waits)
            if self.closing:
                return None
            pieces.append(piece)
        self._start()
        self.counters["cached"] += sum(cached) * sum(frames.shape[1] for frames in ids.values())
        return Step(number, rows, ids, pieces, waits)

    def _cached(self, ids: Mapping[str, np.ndarray], count: int) -> list[bool]:
        """Which samples have all their frames in a cache: they need no piece."""
        cached = np.ones(count, bool)
        for camera, frames in ids.items():
            cached &= self.store.is_cached(camera, frames.ravel()).reshape(frames.shape).all(axis=1)
        return cached.tolist()

    def _open_unit(self, key: tuple, step: int) -> Piece | None:
        """Start to decode a unit as soon as there is room for it; None if there will be none."""
        remaining = self.planner.unit(key, step)
        piece = self._piece(remaining.ids, remaining.last)
        if not self._reserve(piece):
            return None
        self.pieces[key] = piece
        for camera in self.store.caches:
            self.pending_frames |= dict.fromkeys(((camera, i) for i in piece.ids.get(camera, ())), piece)
        self._submit(piece, step)
        return piece

    def _single_sample(self, ids: Mapping[str, np.ndarray], step: int, waits: list[Piece]) -> Piece | None:
        """The frames of one sample that are neither cached nor about to be cached."""
        missing_ids = {}
        for camera, frames in ids.items():
            expected = [self.pending_frames.get((camera, frame)) for frame in frames.tolist()]
            waits += [piece for piece in expected if piece is not None]
            missing_ids[camera] = frames[[piece is None for piece in expected]]
        piece = self._piece(missing_ids, step)
        missing = sum(len(frames) for frames in piece.ids.values())
        if not missing:
            return None
        if not self._reserve(piece):
            if self.closing:
                return None
            self._take_slots(piece, force=True)  # this step needs them
        self.counters["misses"] += missing
        self._submit(piece, step)
        return piece

    def _piece(self, windows: Mapping[str, np.ndarray], last: int) -> Piece:
        ids, uses = {}, {}
        for camera, window in windows.items():
            count = Counter(window.ravel().tolist())
            frames = np.array(sorted(count), np.int64)
            ids[camera] = frames[~self.store.is_cached(camera, frames)] if self.store.caches else frames
            uses[camera] = {frame: count[frame] for frame in ids[camera].tolist()}
        return Piece(ids, uses, last)

    def _reserve(self, piece: Piece) -> bool:
        """Wait for room for a piece; False if there will be none."""
        with self.changed:
            while not self._take_slots(piece) and not self.closing:
                self._start()  # other threads may be waiting for the pieces planned so far
                if not self.outstanding:  # no earlier step will free room
                    return False
                started = time.perf_counter()
                self.changed.wait()
                count_seconds(self.counters, wait_slots_s=time.perf_counter() - started)
            return not self.closing

    def _take_slots(self, piece: Piece, force: bool = False) -> bool:
        sizes: Counter[int] = Counter()
        for camera, frames in piece.ids.items():
            sizes[self.store.format(camera).nbytes] += len(frames)
        slots = self.pool.take(sizes, force)
        if slots is None:
            return False
        for camera, frames in piece.ids.items():
            free = slots[self.store.format(camera).nbytes]
            piece.slots[camera] = {frame: free.pop() for frame in frames.tolist()}
        return True

    # Decoding.

    def _submit(self, piece: Piece, step: int) -> None:
        """Submit a piece for decoding, together with some others: a request costs as much as several frames."""
        piece.pending = sum(len(frames) > 0 for frames in piece.ids.values())
        started = work_clock()
        for camera, frames in piece.ids.items():
            self.store.read_ahead(camera, frames)
        read = work_clock().since(started).read  # of the index of a file
        if read:
            with self.changed:
                count_seconds(self.counters, read_s=read)
        self.group.append(piece)
        self.group_step = step
        if sum(len(frames) for piece in self.group for frames in piece.ids.values()) >= GROUP:
            self._start()

    def _start(self) -> None:
        group, step, self.group = self.group, self.group_step, []
        for camera in self.planner.cameras if group else ():
            pieces = [piece for piece in group if len(piece.ids.get(camera, ()))]
            if pieces:
                self.reader_threads.submit((step, 1), partial(self._decode, pieces, camera))

    def _decode(self, pieces: list[Piece], camera: str) -> None:
        started = decoded = work_clock()
        ids = np.concatenate([piece.ids[camera] for piece in pieces])
        slots: list[Any] = [slot for piece in pieces for slot in piece.slots[camera].values()]
        good: list[int] = []
        bad: dict[int, str] = {}
        failure: BaseException | None = None
        try:
            if self.pool.device is not None:
                bad = self.store.decode_on_gpu(camera, ids, slots)
                good = [i for i in range(len(ids)) if i not in bad]
            else:
                bad = self.store.decode(camera, ids, slots.__getitem__, good.append)
            decoded = work_clock()
            self.store.add_to_cache(camera, ids[good], [slots[i] for i in good])
        except SourceError as error:  # the data can't be reached: that is not a bad frame
            failure = error
        except DatasetError as error:
            bad = dict.fromkeys(set(range(len(ids))) - set(good), str(error))
        except BaseException as error:
            failure = error
        reasons = {int(ids[i]): reason for i, reason in bad.items()}
        work, keeping = decoded.since(started), work_clock().since(decoded)
        with self.changed:
            self.counters["bad_frames"] += len(bad)
            self.counters["decoded"] += len(good)
            self.counters["decode_us"] += round(1e6 * (work.cpu + keeping.cpu))
            count_seconds(
                self.counters,
                read_s=work.read,
                decode_s=work.wall - work.read,
                decode_cpu_s=work.cpu,
                keep_s=keeping.wall,
            )
            if self.pending_frames:
                for frame in ids.tolist():
                    self.pending_frames.pop((camera, frame), None)
            for piece in pieces:
                piece.error = piece.error or failure
                piece.bad[camera] = {f: reasons[f] for f in piece.ids[camera].tolist() if f in reasons}
                piece.pending -= 1
                if not piece.pending:
                    for step in piece.steps:
                        step.pending -= 1
                    piece.steps.clear()  # and with them their batches
        self._advance()

    # Assembling: in order, at most `prefetch` steps ahead of the loop.

    def _advance(self) -> None:
        with self.changed:
            due = []
            for step in self.planned:
                if step.number >= self.next_step + self.prefetch or step.pending:
                    break
                due.append(step)
            for _ in due:
                self.planned.popleft()
        for step in due:  # by a reader thread: the loop has other work to do
            self.reader_threads.submit((step.number, 0), partial(self._assemble, step))

    def _assemble(self, step: Step[T]) -> None:
        started = work_clock()
        try:
            for piece in step.pieces:
                if piece is not None and piece.error is not None:
                    raise piece.error
            jobs = self.assemble(step)
        except BaseException as error:
            step.result.set_exception(error)
            return
        self._count(work_clock().since(started))
        jobs_left = [len(jobs)]

        def run(job: Callable[[], None]) -> None:
            started = work_clock()
            try:
                job()
            except BaseException as error:
                if not step.result.done():
                    step.result.set_exception(error)
            self._count(work_clock().since(started), "convert")
            with self.changed:
                jobs_left[0] -= 1
                last = jobs_left[0] == 0
            if last and not step.result.done():
                self._complete(step)

        for job in jobs[1:]:
            self.reader_threads.submit((step.number, 0), partial(run, job))
        run(jobs[0])

    def _count(self, work: WorkClock, job: str | None = None) -> None:
        with self.changed:
            count_seconds(self.counters, assemble_s=work.wall, assemble_cpu_s=work.cpu)
            if job is not None:
                self.counters[f"{job}_us"] += round(1e6 * work.cpu)

    def _complete(self, step: Step[T]) -> None:
        started = work_clock()
        try:
            result = self.finish(step)
        except BaseException as error:
            step.result.set_exception(error)
            return
        self._count(work_clock().since(started).since(step.processing))
        with self.changed:
            count_seconds(self.counters, host_steps_s=step.processing.wall)
        self._release(step)
        step.result.set_result(result)

    def _release(self, step: Step[T]) -> None:
        """Release frames that no later sample reads."""
        unused: list[Slot] = []
        with self.changed:
            for i, piece in enumerate(step.pieces):
                for camera in piece.ids if piece is not None else ():
                    unused += piece.read(camera, step.ids[camera][i].tolist())  # type: ignore[union-attr]
            self.outstanding.remove(step.number)
            oldest = min(self.outstanding, default=step.number + 1)
            for key in [key for key, piece in self.pieces.items() if piece.last < oldest]:
                for slots in self.pieces.pop(key).slots.values():
                    unused += slots.values()  # another rank reads the rest of it
                    self.counters["evictions"] += len(slots)
            self.pool.give(unused)
            self.changed.notify_all()
