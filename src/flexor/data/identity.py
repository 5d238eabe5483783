"""What a run's data is: hashes of the metadata, tables and videos of its episodes.

A run saves them, and compares when it resumes. They do not depend on where the data is stored, nor on when its files
were written. Statistics (`meta/stats.json`) are not part of it: a run saves those that it uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flexor.core.digest import hash_json
from flexor.data.dataset import Dataset
from flexor.data.frames.clips import VideoClip
from flexor.data.mixture.mixed import MixedDataset
from flexor.data.storage.digests import digests
from flexor.data.storage.source import TABLES


@dataclass(frozen=True)
class DataIdentity:
    """Hashes by the name of what they are of."""

    tables: dict[str, str]
    """Of the metadata that concerns the run's episodes, and of their tables."""
    videos: dict[str, str] | None
    """Of their videos; None if some are read over a network: no run waits for that."""

    def summary(self) -> dict[str, str | None]:
        """What a checkpoint has of it: one hash of each."""
        return {name: None if hashes is None else hash_json(hashes) for name, hashes in vars(self).items()}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def identify(dataset: Dataset) -> DataIdentity:
    """Reads each file once on this machine; later calls use what is remembered."""
    if not isinstance(dataset, MixedDataset):
        return _identify(dataset)
    tables: dict[str, str] = {}
    videos: dict[str, str] | None = {}
    for number, member in enumerate(dataset.members):
        episodes = dataset.episodes.index[dataset.member_of(dataset.episodes.index) == number]
        if not len(episodes):
            continue
        part = _identify(member.dataset.select((episodes - dataset.first_episode[number]).tolist()))
        tables |= {f"dataset {number + 1}: {name}": digest for name, digest in part.tables.items()}
        if videos is not None and part.videos is not None:
            videos |= {f"dataset {number + 1}: {name}": digest for name, digest in part.videos.items()}
        else:
            videos = None
    return DataIdentity(tables, videos)


def _identify(dataset: Dataset) -> DataIdentity:
    files = dataset.episode_files()
    tables = [name for name in files if name.endswith(TABLES)]
    videos = [name for name in files if not name.endswith(TABLES)]
    source = dataset.source
    paths = {name: source.here(name) for name in (*tables, *videos)}
    hashes = digests(source.root, {name: path for name, path in paths.items() if path is not None})
    return DataIdentity(
        {**_metadata(dataset), **{name: hashes[name] for name in tables if name in hashes}},
        {name: hashes[name] for name in videos} if all(name in hashes for name in videos) else None,
    )


def _metadata(dataset: Dataset) -> dict[str, str]:
    """What the metadata says of the run's episodes. Episodes that were recorded since, for others, change nothing."""
    features = [
        (f.name, f.dtype, f.shape, f.names, None if f.depth is None else asdict(f.depth))
        for f in dataset.features.values()
    ]
    used = np.unique(dataset.columns["task_index"])
    episodes, selected = dataset.episodes, {*dataset.episodes.index.tolist()}
    spans = {
        f"{camera} {episode}": (clip.file.name, clip.start, clip.stop)
        for (camera, episode), clip in dataset.store.clips.items()
        if isinstance(clip, VideoClip) and episode in selected
    }
    return {
        "codebase_version in meta/info.json": dataset.version,
        "fps in meta/info.json": str(float(dataset.fps)),
        "features in meta/info.json": hash_json(features),
        "tasks in meta/": hash_json(
            {int(i): dataset.tasks[int(i)] for i in used if 0 <= i < len(dataset.tasks)}
        ),
        "episodes in meta/": hash_json([episodes.index.tolist(), episodes.length.tolist(), episodes.tasks]),
        "the episodes' times in videos in meta/": hash_json(spans),
    }


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What has changed, is missing or is new."""
    changed = [name for name, digest in before.items() if now.get(name, digest) != digest]
    missing = [f"{name} (not there any more)" for name in before if name not in now]
    return [*changed, *missing, *(f"{name} (new)" for name in now if name not in before)]
