"""Decodes the frames of groups of steps into their slots, with threads or decode processes.

Frames are requested in bulk, at least as many as cost more to decode than to request. A unit is never split.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from flexor.core.errors import DatasetError, SourceError
from flexor.data.frames.decode_processes import DecodeProcesses
from flexor.data.frames.store import FrameStore
from flexor.data.loader.decoded_frames import DecodedFrames
from flexor.data.loader.frame_sets import FrameSets
from flexor.data.loader.step import RemainingUnits, StepGroup
from flexor.data.loader.threads import ReaderThreads
from flexor.data.loader.work_time import NO_WORK, WorkClock, count_seconds, work_clock
from flexor.data.video.decode_request import DecodeAnswer

__all__ = ["FrameDecoder"]

FRAMES = 32  # approximate number of frames of all cameras that are decoded with one request
REQUEST_BYTES = 4 << 20  # of these frames, for a process: a request costs as much as some small frames


@dataclass(eq=False)
class Decoding:
    """Frames of one camera that are decoded together, for a group of steps."""

    group: StepGroup[Any]
    camera: str
    pieces: np.ndarray  # [n] of each frame
    ids: np.ndarray
    slots: np.ndarray
    bad: dict[int, str] = field(default_factory=dict)
    failure: BaseException | None = None


class FrameDecoder:
    """Decodes what it is told to. `changed` is the lock of groups and counters."""

    def __init__(
        self,
        store: FrameStore,
        frames: DecodedFrames,
        threads: ReaderThreads,
        processes: DecodeProcesses | None,
        cameras: list[str],
        *,
        counters: Counter[str],
        changed: threading.Condition,
        decoded: Callable[[], None],
    ):
        """`decoded` is called when the frames of a request are in their slots. `processes` decode videos, into the
        pool's memory."""
        self.store, self.frames, self.threads, self.processes = store, frames, threads, processes
        self.counters, self.changed, self.decoded = counters, changed, decoded
        self.in_processes = {camera for camera in cameras if processes is not None and store.is_video(camera)}
        self.expected: dict[str, set[int]] = {camera: set() for camera in cameras}
        """Frames that will be cached."""
        self._least = {camera: self._least_frames(camera, len(cameras)) for camera in cameras}

    def submit(
        self, group: StepGroup[Any], units: RemainingUnits, pieces: np.ndarray, slots: dict[str, np.ndarray]
    ) -> None:
        """Decode the frames of units, which are these pieces [N], into these slots; the group waits for them."""
        decodings = []
        for camera, frames in units.frames.items():
            if self.store.remote:
                self._read_ahead(camera, frames.ids)
            if camera in self.store.caches:
                self.expected[camera].update(frames.ids.tolist())
            of_frame = pieces[frames.numbers]
            for part in self._parts(camera, frames):
                decodings.append(
                    Decoding(group, camera, of_frame[part], frames.ids[part], slots[camera][part])
                )
        with self.changed:
            group.pending += len(decodings)
        for decoding in decodings:
            in_process = decoding.camera in self.in_processes
            if in_process and not self.store.remote:
                self._request(decoding)  # reads nothing
            else:
                job = self._request if in_process else self._decode
                self.threads.submit((group.number, 1), partial(job, decoding))

    def _least_frames(self, camera: str, cameras: int) -> int:
        """Of a request."""
        least = max(1, FRAMES // cameras)
        if camera in self.in_processes:
            least = max(least, REQUEST_BYTES // self.store.stored_format(camera).nbytes)
        return least

    def _parts(self, camera: str, frames: FrameSets) -> Iterator[slice]:
        """The frames of each request."""
        edges, total = frames.edges, len(frames.ids)
        bounds = [0]
        while bounds[-1] < total:
            enough = int(np.searchsorted(edges, bounds[-1] + self._least[camera]))
            bounds.append(int(edges[min(enough, len(edges) - 1)]))
        return (slice(*bound) for bound in pairwise(bounds))

    def _read_ahead(self, camera: str, ids: np.ndarray) -> None:
        started = work_clock()
        self.store.read_ahead(camera, ids)
        read = work_clock().since(started).read  # of the index of a file
        with self.changed:
            count_seconds(self.counters, read_s=read)

    def _request(self, decoding: Decoding) -> None:
        """Let a process decode."""
        assert self.processes is not None
        started = work_clock()
        try:
            offsets = self.frames.offsets(decoding.camera, decoding.slots)
            request, decoding.bad = self.store.decode_request(decoding.camera, decoding.ids, offsets)
        except BaseException as error:
            decoding.failure = error
            self._finish(decoding, work_clock().since(started))
            return
        reading = work_clock().since(started).read

        def answered(answer: DecodeAnswer | BaseException) -> None:
            work = NO_WORK
            if isinstance(answer, BaseException):
                decoding.failure = answer
            else:
                decoding.bad |= answer.bad
                work = WorkClock(answer.wall_s + reading, answer.cpu_s, answer.read_s + reading)
            self._finish(decoding, work)

        self.processes.submit((decoding.group.number,), request, answered)

    def _decode(self, decoding: Decoding) -> None:
        started = work_clock()
        camera, ids, slots = decoding.camera, decoding.ids, self._planes(decoding)
        good: list[int] = []
        try:
            if self.frames.pool.device is not None:
                decoding.bad = self.store.decode_on_gpu(camera, ids, slots)
            else:
                decoding.bad = self.store.decode(camera, ids, slots.__getitem__, good.append)
        except SourceError as error:  # the data can't be reached: that is not a bad frame
            decoding.failure = error
        except DatasetError as error:
            decoding.bad = dict.fromkeys(set(range(len(ids))) - set(good), str(error))
        except BaseException as error:
            decoding.failure = error
        self._finish(decoding, work_clock().since(started))

    def _planes(self, decoding: Decoding) -> list[Any]:
        return [self.frames.planes(decoding.camera, slot) for slot in decoding.slots.tolist()]

    def _finish(self, decoding: Decoding, work: WorkClock) -> None:
        """The frames are in their slots: the group that waits for them may go on."""
        group, bad = decoding.group, decoding.bad
        good = 0 if decoding.failure is not None else len(decoding.ids) - len(bad)
        started = work_clock()
        if self.store.caches and good:
            self._add_to_cache(decoding)
        keeping = work_clock().since(started)
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
            if decoding.camera in self.store.caches:
                self.expected[decoding.camera].difference_update(decoding.ids.tolist())
            for i, reason in bad.items():
                self.frames.bad[decoding.camera][int(decoding.pieces[i]), int(decoding.ids[i])] = reason
            group.error = group.error or decoding.failure
            group.pending -= 1
        self.decoded()

    def _add_to_cache(self, decoding: Decoding) -> None:
        good = [i for i in range(len(decoding.ids)) if i not in decoding.bad]
        try:
            planes = self._planes(decoding)
            self.store.add_to_cache(decoding.camera, decoding.ids[good], [planes[i] for i in good])
        except BaseException as error:
            decoding.failure = error
