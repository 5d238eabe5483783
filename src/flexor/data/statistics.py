"""Statistics of an opened dataset, computed as in LeRobot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from flexor.core.batch import ACTION, STATE
from flexor.core.console import Progress
from flexor.core.errors import DatasetError, SourceError
from flexor.core.log import log
from flexor.data.dataset import Dataset
from flexor.data.format.metadata import read_episode_stats
from flexor.data.format.stats import (
    NEEDED_STATS,
    PIXELS_FROM,
    PIXELS_TO,
    QUANTILES,
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
    dataset: Dataset,
    features: Sequence[str] | None = None,
    progress: Progress | None = None,
    on_bad_episode: str = "raise",
) -> dict[str, Stats]:
    """Statistics of the dataset's episodes; with `features`, only these are read and decoded.

    An episode with an image that can't be decoded is an error. With `on_bad_episode="skip"` it is named and left out.
    """
    available = [*dataset.columns, *dataset.cameras]
    selected = available if features is None else list(features)
    unknown = [name for name in selected if name not in available]
    if unknown:
        raise DatasetError(
            f"can't compute statistics of {', '.join(unknown)}: the dataset's features are {', '.join(available)}."
        )
    per_episode = []
    spans = zip(dataset.episodes.start.tolist(), dataset.episodes.length.tolist())
    for done, (start, length) in enumerate(spans, 1):
        try:
            per_episode.append(_episode_stats(dataset, selected, start, length))
        except SourceError:
            raise
        except DatasetError as error:
            if on_bad_episode == "raise" or (done == len(dataset.episodes) and not per_episode):
                raise
            log.warning("skipped: %s", error)
        if progress is not None:
            progress(done, len(dataset.episodes))
    return aggregate_stats(per_episode)


def true_quantiles(column: np.ndarray) -> Stats:
    """The quantiles of all rows [N, ..., D]; nan does not count.

    Those that a dataset has recorded are averages of its episodes' quantiles, as LeRobot merges them.
    """
    rows = column[:, None] if column.ndim == 1 else column.reshape(-1, column.shape[-1])
    columns = [dimension[np.isfinite(dimension)].astype(np.float64) for dimension in rows.T]
    levels = [*QUANTILES.values()]
    values = np.array(
        [np.quantile(c, levels) if len(c) else np.zeros(len(levels)) for c in columns]
    )  # [D, 5]
    return dict(zip(QUANTILES, values.T.copy()))


def with_own_stats(dataset: Dataset) -> Dataset:
    """The dataset with statistics of its own episodes, if it is a selection: those of the others do not count.

    They are computed from the rows. For images, those that are recorded of each episode are merged; without them, the
    statistics stay those of all episodes.
    """
    if len(dataset.episodes) == len(dataset.store.ends):
        return dataset
    stats = dict(dataset.stats)
    for name in stats:
        if name in dataset.columns:
            stats[name] = _row_stats(dataset.columns[name])
        elif name in dataset.cameras and (merged := _merged_episodes(dataset, name)):
            stats[name] = merged
    return replace(dataset, stats=stats)


def _row_stats(column: np.ndarray) -> Stats:
    rows = column[:, None] if column.ndim == 1 else column.reshape(-1, column.shape[-1])
    rows = rows.astype(np.result_type(rows.dtype, np.float32), copy=False)
    return {
        "min": rows.min(0),
        "max": rows.max(0),
        "mean": rows.mean(0, dtype=np.float64),
        "std": rows.std(0, dtype=np.float64),
        "count": np.array([len(column)]),
        **true_quantiles(column),
    }


def _merged_episodes(dataset: Dataset, camera: str) -> Stats | None:
    """A camera's statistics, merged from those that are recorded of each episode; None if one has none."""
    if dataset.features[camera].depth is not None:
        return None
    episodes = dataset.episodes.index.tolist()
    recorded = {key: read_episode_stats(dataset.source, camera, key) for key in (*NEEDED_STATS, "count")}
    if not all(values.keys() >= {*episodes} for values in recorded.values()):
        return None
    parts = [{key: values[episode] for key, values in recorded.items()} for episode in episodes]
    try:
        merged = aggregate_stats([{camera: part} for part in parts])[camera]
        return {k: v if k == "count" else v.reshape(-1, 1, 1) for k, v in merged.items()}
    except (ValueError, TypeError, IndexError):  # not as LeRobot writes them
        return None


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
    running = RunningStats()
    for chunks in _relative_chunks(dataset, relative, chunk, progress, state_name):
        running.update(chunks)
    return running.result()


def relative_action_stats_by_step(
    dataset: Dataset,
    relative: Sequence[bool],
    chunk: int,
    progress: Progress | None = None,
    *,
    state_name: str = STATE,
) -> Stats:
    """The same for each step of a chunk, [H, A] each."""
    if chunk > (longest := int(dataset.episodes.length.max())):
        raise DatasetError(
            f"can't compute statistics of relative actions over {chunk} steps: the longest episode of "
            f"{dataset.repo_id} has {longest}. Set a smaller policy.chunk_size."
        )
    parts = [*_relative_chunks(dataset, relative, chunk, progress, state_name)]
    chunks = np.concatenate(parts)  # as large as the actions of the dataset, times the length of a chunk
    quantiles = np.quantile(chunks, (0.01, 0.99), axis=0).astype(np.float32)
    return {
        "min": chunks.min(0),
        "max": chunks.max(0),
        "mean": chunks.mean(0, dtype=np.float64).astype(np.float32),
        "std": chunks.std(0, dtype=np.float64).astype(np.float32),
        "q01": quantiles[0],
        "q99": quantiles[1],
        "count": np.array([len(chunks)]),
    }


def _relative_chunks(
    dataset: Dataset, relative: Sequence[bool], chunk: int, progress: Progress | None, state_name: str
) -> Iterator[np.ndarray]:
    """Chunks [n, chunk, A] of relative actions, many at once."""
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
    for first in range(0, len(starts), CHUNKS_AT_ONCE):
        some = starts[first : first + CHUNKS_AT_ONCE]
        chunks = actions[some[:, None] + np.arange(chunk)]  # [n, chunk, A]
        chunks[..., moving] -= states[some][:, None, moving]
        yield chunks
        if progress is not None:
            progress(min(first + CHUNKS_AT_ONCE, len(starts)), len(starts))


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
