"""Statistics of an opened dataset, computed as in LeRobot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flexor.core.errors import DatasetError
from flexor.data.dataset import Dataset
from flexor.data.format.stats import (
    Stats,
    aggregate_stats,
    image_stats,
    pixel_counts,
    sample_indices,
    vector_stats,
)


def compute_stats(dataset: Dataset, features: Sequence[str] | None = None) -> dict[str, Stats]:
    """Statistics of the dataset's episodes; with `features`, only these are read and decoded."""
    known = [*dataset.columns, *dataset.cameras]
    wanted = known if features is None else list(features)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise DatasetError(
            f"can't compute statistics of {', '.join(unknown)}: the dataset's features are {', '.join(known)}."
        )
    episodes = zip(dataset.episodes.start.tolist(), dataset.episodes.length.tolist())
    return aggregate_stats([_episode_stats(dataset, wanted, start, length) for start, length in episodes])


def _episode_stats(dataset: Dataset, features: Sequence[str], start: int, length: int) -> dict[str, Stats]:
    cameras = [name for name in features if name in dataset.cameras]
    result = {
        n: vector_stats(dataset.columns[n][start : start + length]) for n in features if n not in cameras
    }
    if cameras:
        rows = start + sample_indices(length)
        images = dataset.read(rows, cameras=cameras)
        for name in cameras:
            counts = sum(pixel_counts(image) for image in np.moveaxis(images[name], 1, -1))  # [n, H, W, C]
            result[name] = image_stats(np.asarray(counts), len(rows))
    return result
