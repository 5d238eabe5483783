"""Prefetches the frames of training steps: plans ahead, decodes each frame once, and releases it after use.

Small steps are handled in groups: a group costs the interpreter little more than a step. A *piece* is the frames of
one unit (see `order/decode_units.py`) while some of its samples are still to come. The feed runs ahead of the training
loop. It decodes pieces in the order in which they are first needed, while the pool has room, and assembles groups one
after the other. If a group's frames have no room although all earlier groups are done, it decodes only what it needs.
So memory is limited to the pool plus one group, for any dataset.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Generic

import numpy as np

from flexor.core.errors import DatasetError, SourceError
from flexor.data.frames.decode_processes import DecodeProcesses
from flexor.data.frames.store import FrameStore
from flexor.data.loader.decoded_frames import DecodedFrames
from flexor.data.loader.step import Piece, StepGroup, StepPlanner, T
from flexor.data.loader.threads import ReaderThreads
from flexor.data.loader.work_time import NO_WORK, WorkClock, count_seconds, work_clock
from flexor.data.video.decode_request import DecodeAnswer

FRAMES = 32  # approximate number of frames of all cameras that are decoded with one request
REQUEST_BYTES = (
    1 << 20
)  # of these frames, for a process: a request costs the interpreter as much as many small frames


@dataclass(eq=False)
class Decoding:
    """Frames of one camera that are decoded together."""

    pieces: list[Piece]
    camera: str
    ids: np.ndarray
    slots: np.ndarray
    bad: dict[int, str] = field(default_factory=dict)
    failure: BaseException | None = None

    @classmethod
    def of(cls, pieces: list[Piece], camera: str) -> Decoding:
        ids = np.concatenate([piece.ids[camera] for piece in pieces])
        return cls(pieces, camera, ids, np.concatenate([piece.slots[camera] for piece in pieces]))


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
        cameras = planner.cameras if processes is not None else ()
        self.in_processes = {camera for camera in cameras if store.is_video(camera)}
        self.pieces: dict[tuple, Piece] = {}
        self.piece_numbers = count()
        self.request: list[Piece] = []  # planned, to be decoded together
        self.request_frames = self.request_bytes = 0
        self.request_group = 0
        self.pending_frames: dict[tuple[str, int], Piece] = {}  # frames that will be cached, by camera and id
        self.planned: deque[StepGroup[T]] = deque()
        self.outstanding: set[int] = set()
        self.next_group = 0
        self.closing = False
        self.failure: BaseException | None = None
        self.changed = threading.Condition(threading.RLock())

    def groups(self, start: int, stop: int) -> Generator[T]:
        self.next_group = start
        self.reader_threads = ReaderThreads(self.threads, "loader")
        groups: deque[StepGroup[T]] = deque()
        planner_thread = None
        if self.threads:
            planner_thread = threading.Thread(
                target=self._plan_groups, args=(start, stop, groups), name="loader-plan", daemon=True
            )
            planner_thread.start()
        try:
            for number in range(start, stop):
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

    def _plan_groups(self, start: int, stop: int, groups: deque[StepGroup[T]]) -> None:
        try:
            for number in range(start, stop):
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
            for piece in {*group.pieces, *group.waits} - {None}:
                if piece.pending:  # type: ignore[union-attr]
                    piece.groups.append(group)  # type: ignore[union-attr]
                    group.pending += 1
            self.planned.append(group)
            self.outstanding.add(group.number)
            groups.append(group)
            self.changed.notify_all()
        self._advance()

    # Planning: which frames a group needs, and where they will be.

    def _plan(self, number: int) -> StepGroup[T] | None:
        """The group, with its pieces submitted for decoding; None if the feed closes in the meantime."""
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
        return StepGroup(number, self.planner.steps_of(number), rows, ids, pieces, waits)

    def _cached(self, ids: Mapping[str, np.ndarray], count: int) -> list[bool]:
        """Which samples have all their frames in a cache: they need no piece."""
        cached = np.ones(count, bool)
        for camera, frames in ids.items():
            cached &= self.store.is_cached(camera, frames.ravel()).reshape(frames.shape).all(axis=1)
        return cached.tolist()

    def _open_unit(self, key: tuple, group: int) -> Piece | None:
        """Start to decode a unit as soon as there is room for it; None if there will be none."""
        remaining = self.planner.unit(key, group)
        piece = self._piece(remaining.ids, remaining.last)
        if not self._reserve(piece):
            return None
        self.pieces[key] = piece
        self._submit(piece, group)
        return piece

    def _single_sample(self, ids: Mapping[str, np.ndarray], group: int, waits: list[Piece]) -> Piece | None:
        """The frames of one sample that are neither cached nor about to be cached."""
        missing_ids = {}
        for camera, frames in ids.items():
            expected = [self.pending_frames.get((camera, frame)) for frame in frames.tolist()]
            waits += [piece for piece in expected if piece is not None]
            missing_ids[camera] = frames[[piece is None for piece in expected]]
        piece = self._piece(missing_ids, group)
        missing = sum(len(frames) for frames in piece.ids.values())
        if not missing:
            return None
        if not self._reserve(piece):
            if self.closing:
                return None
            self.frames.add(piece, force=True)  # this group needs them
        self.counters["misses"] += missing
        self._submit(piece, group)
        return piece

    def _piece(self, windows: Mapping[str, np.ndarray], last: int) -> Piece:
        ids, uses = {}, {}
        for camera, window in windows.items():
            ids[camera], uses[camera] = distinct_counts(window)
            if self.store.caches:
                missing = ~self.store.is_cached(camera, ids[camera])
                ids[camera], uses[camera] = ids[camera][missing], uses[camera][missing]
        return Piece(next(self.piece_numbers), ids, uses, last)

    def _reserve(self, piece: Piece) -> bool:
        """Wait for room for a piece; False if there will be none."""
        with self.changed:
            while not self.frames.add(piece) and not self.closing:
                self._start()  # other threads may be waiting for the pieces planned so far
                if not self.outstanding:  # no earlier group will free room
                    return False
                started = time.perf_counter()
                self.changed.wait()
                count_seconds(self.counters, wait_slots_s=time.perf_counter() - started)
            return not self.closing

    # Decoding.

    def _submit(self, piece: Piece, group: int) -> None:
        """Submit a piece for decoding, together with some others: a request costs as much as several frames."""
        piece.pending = sum(len(frames) > 0 for frames in piece.ids.values())
        for camera in self.store.caches:
            self.pending_frames |= dict.fromkeys(((camera, i) for i in piece.ids.get(camera, ())), piece)
        if self.store.remote:
            started = work_clock()
            for camera, frames in piece.ids.items():
                self.store.read_ahead(camera, frames)
            read = work_clock().since(started).read  # of the index of a file
            with self.changed:
                count_seconds(self.counters, read_s=read)
        self.request.append(piece)
        self.request_group = group
        for camera, frames in piece.ids.items():
            self.request_frames += len(frames)
            self.request_bytes += len(frames) * self.store.stored_format(camera).nbytes
        enough = REQUEST_BYTES if self.in_processes else 0
        if self.request_frames >= FRAMES and self.request_bytes >= enough:
            self._start()

    def _start(self) -> None:
        request, group, self.request = self.request, self.request_group, []
        self.request_frames = self.request_bytes = 0
        for camera in self.planner.cameras if request else ():
            pieces = [piece for piece in request if len(piece.ids.get(camera, ()))]
            if pieces:
                job = partial(self._decode, pieces, camera)
                if camera in self.in_processes:
                    job = partial(self._request, pieces, camera, group)
                    if not self.store.remote:
                        job()  # reads nothing
                        continue
                self.reader_threads.submit((group, 1), job)

    def _request(self, pieces: list[Piece], camera: str, group: int) -> None:
        """Let a process decode the frames of pieces."""
        assert self.processes is not None
        decoding, started = Decoding.of(pieces, camera), work_clock()
        try:
            offsets = self.frames.offsets(camera, decoding.slots)
            request, decoding.bad = self.store.decode_request(camera, decoding.ids, offsets)
        except BaseException as error:
            decoding.failure = error
            self._decoded(decoding, work_clock().since(started))
            return
        reading = work_clock().since(started).read

        def answered(answer: DecodeAnswer | BaseException) -> None:
            work = NO_WORK
            if isinstance(answer, BaseException):
                decoding.failure = answer
            else:
                decoding.bad |= answer.bad
                work = WorkClock(answer.wall_s + reading, answer.cpu_s, answer.read_s + reading)
            self._decoded(decoding, work)

        self.processes.submit((group,), request, answered)

    def _decode(self, pieces: list[Piece], camera: str) -> None:
        started = work_clock()
        decoding = Decoding.of(pieces, camera)
        ids, slots = decoding.ids, self._planes(decoding)
        good: list[int] = []
        try:
            if self.pool.device is not None:
                decoding.bad = self.store.decode_on_gpu(camera, ids, slots)
            else:
                decoding.bad = self.store.decode(camera, ids, slots.__getitem__, good.append)
        except SourceError as error:  # the data can't be reached: that is not a bad frame
            decoding.failure = error
        except DatasetError as error:
            decoding.bad = dict.fromkeys(set(range(len(ids))) - set(good), str(error))
        except BaseException as error:
            decoding.failure = error
        self._decoded(decoding, work_clock().since(started))

    def _planes(self, decoding: Decoding) -> list[Any]:
        return [self.frames.planes(decoding.camera, slot) for slot in decoding.slots.tolist()]

    def _decoded(self, decoding: Decoding, work: WorkClock) -> None:
        """The frames of pieces are in their slots: the groups that wait for them may go on."""
        ids, camera, bad = decoding.ids, decoding.camera, decoding.bad
        good = 0 if decoding.failure is not None else len(ids) - len(bad)
        started = work_clock()
        if self.store.caches and good:
            try:
                fine = [i for i in range(len(ids)) if i not in bad]
                planes = self._planes(decoding)
                self.store.add_to_cache(camera, ids[fine], [planes[i] for i in fine])
            except BaseException as error:
                decoding.failure = error
        keeping = work_clock().since(started)
        reasons = {int(ids[i]): reason for i, reason in bad.items()}
        with self.changed:
            self.counters["bad_frames"] += len(bad)
            self.counters["decoded"] += good
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
            for piece in decoding.pieces:
                piece.error = piece.error or decoding.failure
                if reasons:
                    of_piece = {f: reasons[f] for f in piece.ids[camera].tolist() if f in reasons}
                    piece.bad |= {camera: of_piece} if of_piece else {}
                piece.pending -= 1
                if not piece.pending:
                    for group in piece.groups:
                        group.pending -= 1
                    piece.groups.clear()  # and with them their batches
        self._advance()

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
            for piece in group.pieces:
                if piece is not None and piece.error is not None:
                    raise piece.error
            for camera, ids in group.ids.items():
                group.slots[camera] = self.frames.find(camera, group.piece_numbers, ids)
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
            self.frames.read(camera, group.piece_numbers, ids)
        with self.changed:
            self.outstanding.remove(group.number)
            oldest = min(self.outstanding, default=group.number + 1)
            for key in [key for key, piece in self.pieces.items() if piece.last < oldest]:
                # another rank reads the rest of it
                self.counters["evictions"] += self.frames.remove(self.pieces.pop(key))
            self.changed.notify_all()


def distinct_counts(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct values, ascending, and how often each occurs."""
    ordered = np.sort(values, axis=None)
    if (ordered[1:] > ordered[:-1]).all():
        return ordered, np.ones(len(ordered), np.int64)
    return np.unique(ordered, return_counts=True)
