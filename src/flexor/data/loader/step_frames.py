"""Finds the frames of steps, and replacements for frames that can't be decoded.

A batch is always full: with `skip`, the next good sample of the step replaces a bad one; with `nearest`, the
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
from flexor.data.loader.decoded_frames import DecodedFrames
from flexor.data.loader.step import StepGroup

Replacements = dict[tuple[int, int], np.ndarray]
"""Planes that replace a frame, by sample and step of its window."""


@dataclass(eq=False)
class StepFrames:
    """The frames of one camera in a group of steps."""

    camera: str
    ids: np.ndarray  # [b, T] frames
    slots: np.ndarray  # [b, T] slots of those that were decoded for these steps; -1 for others
    frames: DecodedFrames
    replacements: Replacements

    @cached_property
    def all_cached(self) -> bool:
        """Whether all frames are in the store's cache: nothing was decoded or replaced for these steps."""
        return not self.replacements and bool((self.slots < 0).all())

    @cached_property
    def all_decoded(self) -> bool:
        """Whether all frames were decoded for these steps, and none was replaced."""
        return not self.replacements and bool((self.slots >= 0).all())

    def planes(self, store: FrameStore, i: int, t: int) -> Slot:
        """The planes of a frame; read-only."""
        if (i, t) in self.replacements:
            return self.replacements[i, t]
        slot = int(self.slots[i, t])
        return (
            store.view(self.camera, int(self.ids[i, t]))
            if slot < 0
            else self.frames.planes(self.camera, slot)
        )


class FrameFinder:
    """Finds the frames of steps, and replacements for bad frames."""

    def __init__(self, store: FrameStore, frames: DecodedFrames, on_bad_frame: str, counters: Counter[str]):
        self.store, self.frames, self.on_bad_frame, self.counters = store, frames, on_bad_frame, counters
        self._reported: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def find(self, group: StepGroup) -> tuple[np.ndarray, list[StepFrames]]:
        """The sample at each position of the group [b], and the frames of each camera."""
        with self._lock:  # several threads assemble steps, and all count here
            return self._find(group)

    def _find(self, group: StepGroup) -> tuple[np.ndarray, list[StepFrames]]:
        order = np.arange(len(group.rows))
        replacements: dict[str, Replacements] = {camera: {} for camera in group.ids}
        broken: set[int] = set()
        bad = {camera: reasons for camera, reasons in self.frames.bad.items() if reasons}
        for i, piece in enumerate(group.pieces.tolist() if bad else ()):
            for camera, reasons in bad.items():
                for t, frame in enumerate(group.ids[camera][i].tolist()):
                    if (piece, frame) in reasons:
                        reason = reasons[piece, frame]
                        self._replace(replacements[camera], (i, t), camera, frame, reason, piece)
                        broken.add(i)
        if group.waits:  # caching may have failed: the disk is full, or the frame is bad
            broken |= self._decode_late(group, replacements)
        if broken and self.on_bad_frame == "skip":
            for number, samples in zip(group.steps, order.reshape(len(group.steps), -1).tolist()):
                self._skip(order, samples, broken, number)
            replacements = {camera: _reordered(by_place, order) for camera, by_place in replacements.items()}
        elif broken:
            self.counters["substituted_samples"] += len(broken)
        return order, [
            StepFrames(camera, ids[order], group.slots[camera][order], self.frames, replacements[camera])
            for camera, ids in group.ids.items()
        ]

    def _skip(self, order: np.ndarray, samples: list[int], broken: set[int], step: int) -> None:
        """Replace the broken ones of the samples of a step."""
        good, bad = [i for i in samples if i not in broken], [i for i in samples if i in broken]
        if not good:
            raise DatasetError(
                f"step {step}: none of its {len(samples)} samples can be decoded. Run `flexor data check` on the "
                "dataset, and exclude the bad episodes with --dataset.exclude_episodes or "
                "--dataset.on_bad_episode=skip."
            )
        for i in bad:
            order[i] = next((g for g in good if g > i), good[0])
        self.counters["skipped_samples"] += len(bad)

    def _replace(
        self,
        replacements: Replacements,
        place: tuple[int, int],
        camera: str,
        frame: int,
        reason: str,
        piece: int,
    ) -> None:
        self._report(camera, frame, reason)
        if self.on_bad_frame == "nearest":
            replacements[place] = self._nearest(camera, frame, piece)

    def _report(self, camera: str, frame: int, reason: str) -> None:
        store = self.store
        episode = int(store.episode_of(np.array([frame]))[0])
        if self.on_bad_frame == "raise":
            raise DatasetError(
                f"{store.where(camera, frame)}: {reason}. Exclude the episode with "
                f"{store.exclusion_hint(episode)}, or set --dataset.on_bad_frame=skip"
            )
        if (camera, episode) not in self._reported:
            self._reported.add((camera, episode))
            skipped = self.on_bad_frame == "skip"
            consequence = "their samples are skipped" if skipped else "the nearest frame replaces them"
            text = f"%d clips have frames that can't be decoded; {consequence}:"
            number = frame - store.first_frame_of(episode)
            store.repeats.add(text, f"{store.describe_episode(episode)}, {camera}, frame {number}: {reason}")

    def _decode_late(self, group: StepGroup, replacements: dict[str, Replacements]) -> set[int]:
        """Decode frames that are neither in a piece nor cached, immediately; returns bad samples."""
        broken = set()
        for camera, ids in group.ids.items():
            missing = ~self.store.is_cached(camera, ids.ravel()).reshape(ids.shape)
            for i, t in np.argwhere(missing).tolist():
                piece, frame = int(group.pieces[i]), int(ids[i, t])
                if group.slots[camera][i, t] >= 0 or (i, t) in replacements[camera]:
                    continue
                planes = np.empty(self.store.stored_format(camera).nbytes, np.uint8)
                bad = self.store.decode(camera, np.array([frame]), [planes].__getitem__)
                if bad:
                    self._replace(replacements[camera], (i, t), camera, frame, bad[0], piece)
                    broken.add(i)
                else:
                    replacements[camera][i, t] = planes
        return broken

    def _nearest(self, camera: str, frame: int, piece: int) -> np.ndarray:
        """The nearest frame of the same episode that can be decoded."""
        store = self.store
        episode = int(store.episode_of(np.array([frame]))[0])
        planes = np.empty(store.stored_format(camera).nbytes, np.uint8)
        bad = self.frames.bad[camera]
        candidates = range(store.first_frame_of(episode), int(store.ends[episode]))
        for candidate in sorted(candidates, key=lambda candidate: abs(candidate - frame)):
            if candidate == frame or (piece, candidate) in bad:
                continue
            (number,) = self.frames.find(camera, np.array([piece]), np.array([candidate])).tolist()
            if number >= 0:
                slot = self.frames.planes(camera, number)
                return slot.cpu().numpy() if isinstance(slot, Tensor) else slot.copy()
            if store.is_cached(camera, np.array([candidate]))[0]:
                store.gather(camera, np.array([candidate]), planes[None])
                return planes
            if not store.decode(camera, np.array([candidate]), [planes].__getitem__):
                return planes
        raise DatasetError(f"{store.where(camera, frame)}: no frame of its episode can be decoded.")


def _reordered(replacements: Replacements, order: np.ndarray) -> Replacements:
    """The replacements of the samples that are now at each position."""
    return {
        (position, t): planes
        for position, sample in enumerate(order.tolist())
        for (i, t), planes in replacements.items()
        if i == sample
    }
