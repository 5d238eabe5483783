"""Reads from an opened dataset what a plan needs to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from flexor.config.schema import TrainConfig
from flexor.data.dataset import Dataset
from flexor.data.frames.clips import BlankClip, VideoClip
from flexor.plan.data.host import PICTURES, Camera, Data
from flexor.policies.fit import fit_to_dataset, sample_of
from flexor.train.datasets import build_datasets

SAMPLED_EPISODES = (
    8  # episodes whose key frames are counted; within a dataset the encoder settings are the same
)


def open_for_plan(config: TrainConfig) -> tuple[TrainConfig, Data]:
    """The settings with the dataset's features filled in, and its facts. Videos on the Hub are not downloaded."""
    training, _ = build_datasets(replace(config.dataset, streaming=True))
    policy = fit_to_dataset(config.policy, training, config.rename_map)
    return replace(config, policy=policy), facts_of(training, *sample_of(policy, config.rename_map))


def facts_of(dataset: Dataset, cameras: Sequence[str], deltas: Mapping[str, Sequence[int]]) -> Data:
    """The facts of a dataset for these cameras and windows (steps relative to now). Decodes one frame per camera."""
    rows = sum(column.nbytes for column in dataset.columns.values()) / max(1, len(dataset))
    return Data(
        frames=len(dataset),
        cameras=tuple(_camera(dataset, name, len(deltas.get(name, [0]))) for name in cameras),
        row_bytes=round(rows),
        file_bytes=dataset.video_bytes,
        fps=dataset.fps,
    )


def _camera(dataset: Dataset, name: str, steps: int) -> Camera:
    clips = dataset.store.clips
    episodes = [e for e in dataset.episodes.index.tolist() if not isinstance(clips[name, e], BlankClip)]
    clip, size = clips[name, episodes[0]], dataset.store.size
    format = dataset.store.format(name)
    if not isinstance(clip, VideoClip):
        return Camera(format.height, format.width, steps, PICTURES, 1, size, format.layout)
    packets = clip.file.index.packets
    sampled = episodes[:: max(1, len(episodes) // SAMPLED_EPISODES)]
    starts = [dataset.store.starts(name, episode) for episode in sampled]
    gop = max(1, round(sum(map(len, starts)) / max(1, sum(len(np.unique(s)) for s in starts))))
    return Camera(packets.height, packets.width, steps, packets.codec, gop, size, format.layout)
