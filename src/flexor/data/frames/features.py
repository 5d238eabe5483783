"""Features of frames, which a frozen image encoder has computed once: stored like frames, and read instead of them.

They have the ids of their frames. A frame that can't be decoded has none: it is bad here for the same reason. All
others are there before the first step, see `train/encode_images.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import torch
from torch import Tensor

from flexor.data.frames.clips import BlankClip
from flexor.data.frames.store import CameraCache, FrameStore

__all__ = ["FeatureFormat", "FeatureStore"]

DAMAGED = (
    "the features of its images are damaged: resume the run, which computes them again, or train without them "
    "(--dataset.cache.features=off)"
)


@dataclass(frozen=True)
class FeatureFormat:
    """The features of one image of a camera, as bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str
    """Of the features in a batch."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def picture_bytes(self) -> int:
        """In a batch."""
        return self.nbytes

    def tensors(self, rows: Tensor) -> Tensor:
        """Bytes uint8 [n, nbytes] -> features [n, ...], sharing their memory."""
        return rows.view(self.dtype).view(len(rows), *self.shape)

    def rows(self, features: Tensor) -> Tensor:
        """The inverse."""
        return features.contiguous().view(len(features), -1).view(torch.uint8)


class FeatureStore(FrameStore):
    """Features of the frames of another store. Safe to use from many threads at once."""

    def __init__(
        self,
        frames: FrameStore,
        formats: Mapping[str, FeatureFormat],
        caches: Mapping[str, CameraCache],
    ):
        """`formats` and `caches` by camera."""
        super().__init__(frames.clips, np.diff(frames.ends, prepend=0), frames.size)
        self.frame_store, self.formats, self.caches = frames, formats, caches
        self.repeats = frames.repeats
        self.bad: dict[str, dict[int, str]] = {camera: {} for camera in formats}
        """Frames that can't be decoded, and why."""

    def stored_format(self, camera: str) -> FeatureFormat:
        return self.formats[camera]

    def image_ids(self, camera: str, ids: np.ndarray) -> np.ndarray:
        """Images of a camera that a dataset lacks are black: all have the features of the first."""
        blank = self.blank_episodes[camera]
        if not len(blank):
            return ids
        return np.where(np.isin(self.episode_of(ids), blank), self.first_frame_of(int(blank[0])), ids)

    @cached_property
    def blank_episodes(self) -> dict[str, np.ndarray]:
        """Those without an image of a camera, by camera, ascending."""
        episodes: dict[str, list[int]] = {camera: [] for camera in self.formats}
        for (camera, episode), clip in self.clips.items():
            if isinstance(clip, BlankClip) and camera in episodes:
                episodes[camera].append(episode)
        return {camera: np.array(sorted(numbers), np.int64) for camera, numbers in episodes.items()}

    def decode(
        self,
        camera: str,
        ids: np.ndarray,
        slot: Callable[[int], np.ndarray],
        then: Callable[[int], None] | None = None,
    ) -> dict[int, str]:
        """There is nothing to decode: what is not in the cache is bad."""
        return {i: self.bad[camera].get(frame, DAMAGED) for i, frame in enumerate(ids.tolist())}

    def is_video(self, camera: str) -> bool:
        return False

    def where(self, camera: str, frame: int) -> str:
        return self.frame_store.where(camera, frame)

    def describe_episode(self, episode: int) -> str:
        return self.frame_store.describe_episode(episode)

    def exclusion_hint(self, episode: int) -> str:
        return self.frame_store.exclusion_hint(episode)
