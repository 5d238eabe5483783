"""Finds the frames of a step, and replacements for frames that can't be decoded.

A batch is always full: with `skip`, the next good sample of the batch replaces a bad one; with `nearest`, the
nearest frame of the same episode replaces the bad frame. Both are counted and logged, never silent.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from flexor.core.errors import DatasetError
from flexor.data.frames.slots import Slot
from flexor.data.frames.store import FrameStore
from flexor.data.loader.step import Piece, Step


@dataclass(eq=False)
class StepFrames:
    """The frames of one camera in a step."""

    camera: str
    ids: np.ndarray  # [b, T] frames
    pieces: list[Piece | None]  # [b] pieces that may contain them
    stand_ins: dict[tuple[int, int], np.ndarray]
    """Planes that replace a frame, by sample and step of its window."""

    @cached_property
    def all_cached(self) -> bool:
        """Whether all frames are in the store's cache: nothing was decoded or replaced for this step."""
        return not self.stand_ins and not any(piece is not None for piece in self.pieces)

    def planes(self, store: FrameStore, i: int, t: int) -> Slot:
        """The planes of a frame; read-only."""
        if (i, t) in self.stand_ins:
            return self.stand_ins[i, t]
        found = self.decoded(i, t)
        return store.view(self.camera, int(self.ids[i, t])) if found is None else found

    def decoded(self, i: int, t: int) -> Slot | None:
        """The frame as decoded for this step, or None."""
        piece = self.pieces[i]
        return piece.find(self.camera, int(self.ids[i, t])) if piece is not None else None


class FrameFinder:
    """Finds the frames of steps, and replacements for bad frames."""

    def __init__(self, store: FrameStore, on_bad_frame: str, counters: Counter[str]):
        self.store, self.on_bad_frame, self.counters = store, on_bad_frame, counters
        self._told: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def find(self, step: Step) -> tuple[np.ndarray, list[StepFrames]]:
        """The sample at each position of the step [b], and the frames of each camera."""
        with self._lock:  # several threads assemble steps, and all count here
            return self._find(step)

    def _find(self, step: Step) -> tuple[np.ndarray, list[StepFrames]]:
        order = np.arange(len(step.rows))
        stand_ins: dict[str, dict[tuple[int, int], np.ndarray]] = {camera: {} for camera in step.ids}
        broken: set[int] = set()
        for i, piece in enumerate(step.pieces):
            for camera, bad in piece.bad.items() if piece is not None else ():
                for t, frame in enumerate(step.ids[camera][i].tolist()):
                    if frame in bad:
                        self._replace(stand_ins[camera], (i, t), camera, frame, bad[frame], piece)
                        broken.add(i)
        if step.waits:  # caching may have failed: the disk is full, or the frame is bad
            broken |= self._decode_late(step, stand_ins)
        if broken and self.on_bad_frame == "skip":
            self._skip(order, broken, step.number)
            stand_ins = {camera: _moved(found, order) for camera, found in stand_ins.items()}
        elif broken:
            self.counters["substituted_samples"] += len(broken)
        pieces = [step.pieces[i] for i in order]
        return order, [StepFrames(c, ids[order], pieces, stand_ins[c]) for c, ids in step.ids.items()]

    def _skip(self, order: np.ndarray, broken: set[int], number: int) -> None:
        good = [i for i in range(len(order)) if i not in broken]
        if not good:
            raise DatasetError(
                f"step {number}: none of its {len(order)} samples can be decoded. Run `flexor data check` on the "
                "dataset, and exclude the bad episodes with --dataset.exclude_episodes or "
                "--dataset.on_bad_episode=skip."
            )
        for i in broken:
            order[i] = next((g for g in good if g > i), good[0])
        self.counters["skipped_samples"] += len(broken)

    def _replace(
        self,
        stand_ins: dict[tuple[int, int], np.ndarray],
        place: tuple[int, int],
        camera: str,
        frame: int,
        reason: str,
        piece: Piece | None,
    ) -> None:
        self._tell(camera, frame, reason)
        if self.on_bad_frame == "nearest":
            stand_ins[place] = self._nearest(camera, frame, piece)

    def _tell(self, camera: str, frame: int, reason: str) -> None:
        store = self.store
        episode = int(store.episode_of(np.array([frame]))[0])
        if self.on_bad_frame == "raise":
            raise DatasetError(
                f"{store.where(camera, frame)}: {reason}. Exclude the episode with "
                f"{store.how_to_exclude(episode)}, or set --dataset.on_bad_frame=skip"
            )
        if (camera, episode) not in self._told:
            self._told.add((camera, episode))
            done = (
                "their samples are skipped"
                if self.on_bad_frame == "skip"
                else "the nearest frame replaces them"
            )
            place = f"{store.in_words(episode)}, {camera}, frame {frame - store.first_of(episode)}"
            store.repeats.add(f"%d clips have frames that can't be decoded; {done}:", f"{place}: {reason}")

    def _decode_late(self, step: Step, stand_ins: dict[str, dict[tuple[int, int], np.ndarray]]) -> set[int]:
        """Decode frames that are neither in a piece nor cached, immediately; returns bad samples."""
        broken = set()
        for camera, ids in step.ids.items():
            lost = ~self.store.kept(camera, ids.ravel()).reshape(ids.shape)
            for i, t in np.argwhere(lost).tolist():
                piece, frame = step.pieces[i], int(ids[i, t])
                if (piece is not None and frame in piece.uses[camera]) or (i, t) in stand_ins[camera]:
                    continue
                planes = np.empty(self.store.format(camera).nbytes, np.uint8)
                bad = self.store.decode(camera, np.array([frame]), [planes].__getitem__)
                if bad:
                    self._replace(stand_ins[camera], (i, t), camera, frame, bad[0], piece)
                    broken.add(i)
                else:
                    stand_ins[camera][i, t] = planes
        return broken

    def _nearest(self, camera: str, frame: int, piece: Piece | None) -> np.ndarray:
        """The nearest frame of the same episode that can be decoded."""
        store = self.store
        episode = int(store.episode_of(np.array([frame]))[0])
        planes = np.empty(store.format(camera).nbytes, np.uint8)
        known = piece.bad.get(camera, {}) if piece is not None else {}
        others = range(store.first_of(episode), int(store.ends[episode]))
        for other in sorted(others, key=lambda other: abs(other - frame)):
            if other == frame or other in known:
                continue
            found = piece.find(camera, other) if piece is not None else None
            if found is not None:
                return found.cpu().numpy() if isinstance(found, Tensor) else found.copy()
            if store.kept(camera, np.array([other]))[0]:
                store.gather(camera, np.array([other]), planes[None])
                return planes
            if not store.decode(camera, np.array([other]), [planes].__getitem__):
                return planes
        raise DatasetError(f"{store.where(camera, frame)}: no frame of its episode can be decoded.")


def _moved(
    stand_ins: dict[tuple[int, int], np.ndarray], order: np.ndarray
) -> dict[tuple[int, int], np.ndarray]:
    """The replacements of the samples that are now at each position."""
    return {
        (position, t): planes
        for position, sample in enumerate(order.tolist())
        for (i, t), planes in stand_ins.items()
        if i == sample
    }
