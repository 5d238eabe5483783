"""Camera frames by episode: decoded once and kept in RAM if they fit, decoded on request if not.

`FrameStore.get` is the seam: it takes (camera, episode, frames of the episode) and gives pixels. How
those come about (here: whole episodes in RAM, or single groups of pictures) is nobody else's business.
"""

import threading
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from flexor.errors import DatasetError
from flexor.log import log
from flexor.machine import free_memory

__all__ = ["Clip", "FrameStore", "default_budget"]


class Clip(Protocol):
    """One camera's frames of one episode."""

    @property
    def nbytes(self) -> int:
        """What all of its frames take once decoded."""

    def read(self, frames: np.ndarray) -> np.ndarray:
        """Frames by number in the episode -> uint8 [n, H, W, C]."""

    def read_all(self) -> np.ndarray:
        """All of the episode's frames, uint8 [length, H, W, C]."""


class FrameStore:
    """Frames of many clips, under a byte budget. Safe to use from many threads at once."""

    def __init__(self, clips: Mapping[tuple[str, int], Clip], budget: int | None = None):
        self.clips = clips
        self.budget = default_budget() if budget is None else budget
        self._kept: dict[tuple[str, int], np.ndarray] = {}
        self._admitted: set[tuple[str, int]] = set()
        self._decided: set[tuple[str, tuple[int, ...]]] = set()
        self._reserved = 0
        self._lock = threading.Lock()
        self._clip_locks: dict[tuple[str, int], threading.Lock] = {}

    def admit(self, camera: str, episodes: np.ndarray) -> bool:
        """Reserve room for a camera's frames of these episodes, all of them or none.

        Keeping a part would help little (a shuffled pass misses the rest at every turn) and hide the
        reason for the slowness.
        """
        keys = [(camera, int(episode)) for episode in episodes]
        with self._lock:
            new = [key for key in keys if key not in self._admitted]
            if not new:
                return True
            need = sum(self.clips[key].nbytes for key in new)
            fits = self._reserved + need <= self.budget
            if fits:
                self._reserved += need
                self._admitted.update(new)
            if (camera, tuple(episodes.tolist())) not in self._decided:
                self._decided.add((camera, tuple(episodes.tolist())))
                self._report(camera, need, fits)
            return fits

    def get(self, camera: str, episodes: np.ndarray, frames: np.ndarray) -> np.ndarray:
        """Frame frames[i] of episode episodes[i] (its index in the dataset) -> uint8 [n, H, W, C]."""
        out: np.ndarray | None = None
        order = np.argsort(episodes, kind="stable")
        bounds = np.flatnonzero(np.diff(episodes[order])) + 1
        for group in np.split(order, bounds):
            pixels = self._read((camera, int(episodes[group[0]])), frames[group])
            if out is None:
                out = np.empty((len(episodes), *pixels.shape[1:]), np.uint8)
            if pixels.shape[1:] != out.shape[1:]:
                raise DatasetError(
                    f"camera {camera}: episode {episodes[group[0]]} has pictures of {pixels.shape[1:]}, "
                    f"others of {out.shape[1:]} (height, width, channels). Leave it out of --dataset.episodes"
                )
            out[group] = pixels
        assert out is not None, "no frames asked for"
        return out

    def _read(self, key: tuple[str, int], frames: np.ndarray) -> np.ndarray:
        kept = self._kept.get(key)
        if kept is None and key in self._admitted:
            with self._lock:
                lock = self._clip_locks.setdefault(key, threading.Lock())
            with lock:  # the first thread decodes, the others wait for it
                if key not in self._kept:
                    self._kept[key] = self.clips[key].read_all()
            kept = self._kept[key]
        return self.clips[key].read(frames) if kept is None else kept[frames]

    def _report(self, camera: str, need: int, fits: bool) -> None:
        if fits:
            log.info(
                "%s: %s of frames fit into the frame store (%s of %s used): each video is decoded once",
                camera,
                _size(need),
                _size(self._reserved),
                _size(self.budget),
            )
        else:
            log.warning(
                "%s: %s of frames do not fit into the frame store (%s of %s used): frames are decoded again "
                "whenever they are read",
                camera,
                _size(need),
                _size(self._reserved),
                _size(self.budget),
            )


def default_budget() -> int:
    """A quarter of the RAM that is free now."""
    return free_memory() // 4


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
