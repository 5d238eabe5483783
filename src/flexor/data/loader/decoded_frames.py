"""The decoded frames of the steps to come: where each is, from its decoding to its last use.

A *piece* is the frames of one unit (see `order/decode_units.py`) while some of its samples are still to come. Later
pieces have higher numbers. A frame may be there several times: units overlap if windows do, and each has its own copy.
So it is found by the number of its piece and its id. All frames of a group are found at once: one by one, that would
cost as much as decoding some.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np

from flexor.data.frames.slots import Pool, Slot
from flexor.data.frames.store import FrameStore
from flexor.data.loader.step import RemainingUnits

__all__ = ["DecodedFrames", "SlotTable"]

LEAST = 1024  # rows


class DecodedFrames:
    """The frames of all cameras in the slots of a pool."""

    def __init__(self, store: FrameStore, pool: Pool, cameras: Sequence[str]):
        self.pool = pool
        self._nbytes = {camera: store.stored_format(camera).nbytes for camera in cameras}
        self._tables = {camera: SlotTable(store.frames) for camera in cameras}
        self.bad: dict[str, dict[tuple[int, int], str]] = {camera: {} for camera in cameras}
        """Why frames can't be decoded, by piece and id."""

    def nbytes(self, units: RemainingUnits) -> np.ndarray:
        """The bytes of each unit's frames, [N]."""
        nbytes = np.zeros(len(units), np.int64)
        for camera, frames in units.frames.items():
            nbytes += frames.counts * self._nbytes[camera]
        return nbytes

    def add(
        self, units: RemainingUnits, pieces: np.ndarray, force: bool = False
    ) -> dict[str, np.ndarray] | None:
        """Give slots to the frames of units, which get these numbers as pieces, [N] ascending; None if there is no room
        for all of them. Returns the slots of each camera's frames."""
        sizes: Counter[int] = Counter()
        for camera, frames in units.frames.items():
            sizes[self._nbytes[camera]] += len(frames.ids)
        slots = self.pool.take(sizes, force)
        if slots is None:
            return None
        slots_of = {}
        for camera, frames in units.frames.items():
            size, count = self._nbytes[camera], len(frames.ids)
            slots_of[camera], slots[size] = slots[size][:count], slots[size][count:]
            self._tables[camera].add(pieces[frames.numbers], frames.ids, slots_of[camera], frames.uses)
        return slots_of

    def find(self, camera: str, pieces: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """The slots of frames, each in the piece of that number; -1 if it is not there, or for piece -1."""
        return self._tables[camera].find(pieces, ids)

    def read(self, camera: str, pieces: np.ndarray, ids: np.ndarray) -> None:
        """Count these as read; slots that will not be read again are free."""
        self.pool.give(self._nbytes[camera], self._tables[camera].read(pieces, ids))

    def remove(self, pieces: np.ndarray) -> int:
        """Forget pieces [K] that will not be read any more; the number of their frames that were not read."""
        unread = 0
        for camera, table in self._tables.items():
            slots = table.remove(pieces)
            self.pool.give(self._nbytes[camera], slots)
            unread += len(slots)
            if self.bad[camera]:
                gone = {*pieces.tolist()}
                self.bad[camera] = {key: why for key, why in self.bad[camera].items() if key[0] not in gone}
        return unread

    def planes(self, camera: str, slot: int) -> Slot:
        """The planes in a slot, uint8 [nbytes]."""
        return self.pool.slot(self._nbytes[camera], slot)

    def gather(self, camera: str, slots: np.ndarray, out: np.ndarray) -> None:
        """Copy planes in host memory to `out`, uint8 [n, nbytes]."""
        self.pool.gather(self._nbytes[camera], slots, out)

    def offsets(self, camera: str, slots: np.ndarray) -> np.ndarray:
        """Where slots begin in memory that is shared with decode processes."""
        return self.pool.offsets(self._nbytes[camera], slots)


class SlotTable:
    """The slots of one camera's frames. Pieces are added in the order of their numbers."""

    def __init__(self, frames: int):
        """`frames`: number of frames in the dataset."""
        self._frames = frames
        self._count = 0  # rows in use
        self._keys, self._slots, self._uses = np.empty((3, LEAST), np.int64)
        self._lock = threading.Lock()

    def add(self, pieces: np.ndarray, ids: np.ndarray, slots: np.ndarray, uses: np.ndarray) -> None:
        """Frames of pieces, ascending by piece and id, and how often each will be read."""
        with self._lock:
            end = self._count + len(ids)
            if end > len(self._keys):
                self._make_room(len(ids))
                end = self._count + len(ids)
            rows = slice(self._count, end)
            self._keys[rows] = pieces * self._frames + ids
            self._slots[rows] = slots
            self._uses[rows] = uses
            self._count = end

    def find(self, pieces: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """The slots of frames, each in its piece; -1 if it is not there."""
        with self._lock:
            rows, present = self._rows(pieces, ids)
            return np.where(present, self._slots[rows], -1)

    def read(self, pieces: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Count these as read; returns the slots that will not be read again."""
        with self._lock:
            rows, present = self._rows(pieces, ids)
            distinct, times = np.unique(rows[present], return_counts=True)
            self._uses[distinct] -= times
            return self._take(distinct[self._uses[distinct] == 0])

    def remove(self, pieces: np.ndarray) -> np.ndarray:
        """The slots of pieces that are still in use. They are not found any more."""
        with self._lock:
            first, end = np.searchsorted(
                self._keys[: self._count], np.stack([pieces, pieces + 1]) * self._frames
            )
            count = end - first
            rows = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
            return self._take(rows[self._slots[rows] >= 0])

    def _take(self, rows: np.ndarray) -> np.ndarray:
        slots = self._slots[rows]
        self._slots[rows] = -1
        return slots

    def _rows(self, pieces: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The row of each frame, and whether it is there."""
        keys = np.where(pieces >= 0, pieces * self._frames + ids, -1)
        rows = np.searchsorted(self._keys[: self._count], keys)
        rows[rows == self._count] = 0
        return rows, (self._keys[rows] == keys) & (self._count > 0)

    def _make_room(self, count: int) -> None:
        """Drop the rows of frames that were read; if most are in use, take a larger table."""
        rows = np.flatnonzero(self._slots[: self._count] >= 0)
        size = max(len(self._keys), 2 * (len(rows) + count))
        for name in ("_keys", "_slots", "_uses"):
            column = np.empty(size, np.int64)
            column[: len(rows)] = getattr(self, name)[rows]
            setattr(self, name, column)
        self._count = len(rows)
