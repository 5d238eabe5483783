"""Statistics of an opened dataset, computed as in LeRobot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flexor.core.batch import ACTION, STATE
from flexor.core.console import Progress
from flexor.core.errors import DatasetError
from flexor.data.dataset import Dataset
from flexor.data.format.stats import (
    PIXELS_FROM,
    PIXELS_TO,
    RunningStats,
    Stats,
    aggregate_stats,
    image_stats,
    pixel_counts,
    sample_indices,
    vector_stats,
)

CHUNKS_AT_ONCE = 50_000  # as in LeRobot: a histogram is widened between two parts, so quantiles depend on it


def compute_stats(
    dataset: Dataset, features: Sequence[str] | None = None, progress: Progress | None = None
) -> dict[str, Stats]:
    """Statistics of the dataset's episodes; with `features`, only these are read and decoded."""
    available = [*dataset.columns, *dataset.cameras]
    selected = available if features is None else list(features)
    unknown = [name for name in selected if name not in available]
    if unknown:
        raise DatasetError(
            f"can't compute statistics of {', '.join(unknown)}: the dataset's features are {', '.join(available)}."
        )
    episodes = zip(dataset.episodes.start.tolist(), dataset.episodes.length.tolist())
    per_episode = []
    for start, length in episodes:
        per_episode.append(_episode_stats(dataset, selected, start, length))
        if progress is not None:
            progress(len(per_episode), len(dataset.episodes))
    return aggregate_stats(per_episode)


def relative_action_stats(
    dataset: Dataset,
    relative: Sequence[bool],
    chunk: int,
    progress: Progress | None = None,
    *,
    state_name: str = STATE,
) -> Stats:
    """Statistics of actions relative to the state at the beginning of their chunk, where `relative` says so.

    Over all chunks of so many steps that end within their episode, as in LeRobot. If every episode is shorter, over
    chunks as long as the longest one.
    """
    for name in (ACTION, state_name):
        if name not in dataset.columns:
            raise DatasetError(
                f"can't compute statistics of relative actions: {dataset.repo_id} has no {name}."
            )
    actions, states = (dataset.columns[name].astype(np.float32) for name in (ACTION, state_name))
    actions, states = (x[:, None] if x.ndim == 1 else x for x in (actions, states))
    chunk = min(chunk, int(dataset.episodes.length.max()))
    spans = zip(dataset.episodes.start, dataset.episodes.end - chunk + 1)
    starts = np.concatenate([np.arange(start, end) for start, end in spans])
    moving = np.flatnonzero(relative)
    running = RunningStats()
    for first in range(0, len(starts), CHUNKS_AT_ONCE):
        some = starts[first : first + CHUNKS_AT_ONCE]
        chunks = actions[some[:, None] + np.arange(chunk)]  # [n, chunk, A]
        chunks[..., moving] -= states[some][:, None, moving]
        running.update(chunks)
        if progress is not None:
            progress(min(first + CHUNKS_AT_ONCE, len(starts)), len(starts))
    return running.result()


def _episode_stats(dataset: Dataset, features: Sequence[str], start: int, length: int) -> dict[str, Stats]:
    cameras = [name for name in features if name in dataset.cameras]
    rows = slice(start, start + length)
    result = {name: vector_stats(dataset.columns[name][rows]) for name in features if name not in cameras}
    if cameras:
        sampled = start + sample_indices(length)
        images = dataset.read(sampled, cameras=cameras)
        for name in cameras:
            if dataset.features[name].depth is not None:
                result[name] = depth_stats(images[name])
                continue
            counts = sum(pixel_counts(image) for image in np.moveaxis(images[name], 1, -1))  # [n, H, W, C]
            result[name] = image_stats(np.asarray(counts), len(sampled))
    return result


def depth_stats(depths: np.ndarray) -> Stats:
    """Statistics of depth maps [n, 1, H, W] in the unit in which they were read, each [1, 1, 1]."""
    running = RunningStats()
    step = 1 if max(depths.shape[-2:]) < PIXELS_FROM else int(max(depths.shape[-2:]) / PIXELS_TO)
    running.update(depths[..., ::step, ::step].reshape(-1, 1))
    stats = {name: value.reshape(-1, 1, 1) for name, value in running.result().items() if name != "count"}
    return stats | {"count": np.array([len(depths)])}


def in_stored_unit(dataset: Dataset, stats: dict[str, Stats]) -> dict[str, Stats]:
    """Statistics as a dataset stores them: those of depth maps in the unit of its recording."""
    result = dict(stats)
    for name, feature in dataset.features.items():
        if feature.depth is None or name not in stats:
            continue
        factor = feature.depth.reading(dataset.store.depth_unit).factor
        result[name] = {k: v if k == "count" else v / factor for k, v in stats[name].items()}
    return result
