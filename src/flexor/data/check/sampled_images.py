"""Looks at a few images of some episodes, where not every frame is decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import av
import numpy as np

from flexor.core.errors import DatasetError, SourceError
from flexor.data.check.images import (
    BLANK,
    ImageFault,
    ImageWatch,
    cheap_samples,
    image_faults,
    motions,
    spread,
)
from flexor.data.dataset import Dataset
from flexor.data.format.metadata import read_episode_stats
from flexor.data.frames.clips import BlankClip, ImageClip
from flexor.data.mixture.mixed import MixedDataset, without_padding
from flexor.data.storage.source import Source
from flexor.data.video.decode import Sink

EPISODES = 32  # of a camera that are looked at
EPISODES_IN_TABLES = 8  # the same, where a table is read to look at one of its images


def faulty_images(dataset: Dataset, cameras: Sequence[str]) -> dict[str, dict[int, ImageFault]]:
    """Faults by name of camera and number of episode. Nothing is downloaded for it."""
    if dataset.source_kind != "disk":
        return {}
    columns = {
        name: _by_episode(dataset, name) for name in dataset.columns if name.startswith(("obs", "act"))
    }
    motion = motions(columns)
    faults: dict[str, dict[int, ImageFault]] = {}
    for camera in cameras:
        if dataset.features[camera].depth is not None:
            continue
        for position in _some_episodes(dataset, camera):
            episode = int(dataset.episodes.index[position])
            frames, watch = _look(dataset, camera, episode)
            if frames:
                blank, since = np.array(watch.blank), np.array(watch.since)
                length = int(dataset.episodes.length[position])
                for fault in image_faults(frames, blank, since, length, dataset.fps, motion.get(episode)):
                    faults.setdefault(camera, {})[episode] = fault
    return faults


def blank_by_statistics(dataset: Dataset, cameras: Sequence[str]) -> dict[str, list[int]]:
    """Episodes that are blank from beginning to end, by the statistics that a recording stores of each episode."""
    if isinstance(dataset, MixedDataset) and len(dataset.members) > 1:
        return {}  # only in the images themselves
    colour = [camera for camera in cameras if dataset.features[camera].depth is None]
    episodes = dataset.episodes.index.tolist()
    return {camera: blank for camera in colour if (blank := recorded_blank(dataset.source, camera, episodes))}


def recorded_blank(source: Source, camera: str, episodes: Iterable[int]) -> list[int]:
    """Those of the episodes that are blank by the statistics that the metadata has of each."""
    low, high = (read_episode_stats(source, camera, key) for key in ("min", "max"))
    return [
        episode
        for episode in sorted({*episodes} & low.keys() & high.keys())
        if low[episode].shape == high[episode].shape and (high[episode] - low[episode]).max() <= BLANK / 255
    ]


def _some_episodes(dataset: Dataset, camera: str) -> list[int]:
    """Positions of episodes, evenly spread."""
    count, clips = len(dataset.episodes), dataset.store.clips
    in_tables = any(isinstance(clip, ImageClip) for (name, _), clip in clips.items() if name == camera)
    limit = EPISODES_IN_TABLES if in_tables else EPISODES
    return spread(count, limit).tolist()


def _look(dataset: Dataset, camera: str, episode: int) -> tuple[list[int], ImageWatch]:
    clip = dataset.store.clips.get((camera, episode))
    if clip is None or isinstance(clip, BlankClip):  # black by choice: its dataset does not have the camera
        return [], ImageWatch()
    try:
        starts = clip.starts()
        frames = cheap_samples(np.arange(len(starts)) - starts)
        _, decode, numbers = clip.request(frames)
        numbers, first = np.unique(numbers, return_index=True)
        return look_at(decode, numbers, frames[first].tolist())
    except SourceError:
        raise
    except (DatasetError, OSError, ValueError, av.FFmpegError):  # who reads the frame says why
        return [], ImageWatch()


def look_at(
    decode: Callable[[np.ndarray, Sink], dict[int, str]], numbers: np.ndarray, frames: Sequence[int]
) -> tuple[list[int], ImageWatch]:
    """The frames that could be decoded, and what was seen in them. `numbers`: of these frames in their file."""
    images: dict[int, av.VideoFrame] = {}
    decode(numbers, images.__setitem__)
    watch = ImageWatch()
    for place in sorted(images):
        watch.add(frames[place], images[place])
    return [frames[place] for place in sorted(images)], watch


def _by_episode(dataset: Dataset, name: str) -> dict[int, np.ndarray]:
    rows = without_padding(dataset, name).reshape(len(dataset), -1)
    spans = zip(
        dataset.episodes.index.tolist(), dataset.episodes.start.tolist(), dataset.episodes.end.tolist()
    )
    return {episode: rows[start:end] for episode, start, end in spans}
