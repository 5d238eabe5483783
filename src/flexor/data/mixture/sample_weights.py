"""Weights of samples in the loss: from a column, from a file, or from the progress of the task (RA-BC).

RA-BC (reward-aligned behaviour cloning, https://arxiv.org/abs/2509.25358) asks how much the task progresses during
the chunk of actions that a sample teaches: samples that make no progress count less, and those that undo it not at
all. The progress of each frame comes from a reward model, in a file as LeRobot's `compute_rabc_weights` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flexor.core.batch import SAMPLE_WEIGHT
from flexor.core.errors import ConfigError, DatasetError
from flexor.core.log import log
from flexor.data.dataset import Dataset
from flexor.data.mixture.mixed import MixedDataset
from flexor.data.settings import SampleWeightingConfig
from flexor.data.storage.source import find_source

PROGRESS_FILE = "sarm_progress.parquet"


def with_weights(
    dataset: Dataset, settings: SampleWeightingConfig, chunk: int, paths: Sequence[str | None] = ()
) -> Dataset:
    """The dataset with a column of weights, if there are any. `chunk`: the steps of the policy's chunk of actions.

    `paths`: of several datasets, the file of each.
    """
    if settings.resolved_type == "uniform":
        return dataset
    if isinstance(dataset, MixedDataset):
        weights = _of_members(dataset, settings, chunk, paths)
    else:
        weights = _of_dataset(dataset, settings, chunk, settings.progress_path)
    invalid = np.count_nonzero(~(np.isfinite(weights) & (weights >= 0)))
    if invalid or not weights.any():
        wrong = f"{invalid} of {len(weights)} weights are negative, NaN or infinite"
        problem = wrong if invalid else "all weights are 0"
        raise DatasetError(f"{dataset.repo_id}: {problem}. Correct the file or column of sample_weighting.")
    log.info(
        "sample weights (%s): mean %.3f, %.1f %% of the samples have none",
        *(settings.resolved_type, weights.mean(), 100 * (weights == 0).mean()),
    )
    return replace(dataset, columns={**dataset.columns, SAMPLE_WEIGHT: weights.astype(np.float32)})


def rabc_weights(
    index: np.ndarray,
    episode: np.ndarray,
    progress: np.ndarray,
    chunk: int,
    *,
    kappa: float = 0.01,
    epsilon: float = 1e-6,
    fallback: float = 1.0,
) -> np.ndarray:
    """The weight of each frame, by its index in the dataset, from the progress of some frames [n]: equations 8 and 9.

    The progress of a frame is compared with that `chunk` frames later, or at the end of the episode. A frame without
    progress gets the `fallback`.
    """
    size = int(index.max()) + 1
    progress_of, future = np.full(size, np.nan), np.zeros(size, np.int64)
    progress_of[index] = progress
    for number in np.unique(episode):
        frames = index[episode == number]
        future[frames] = np.minimum(frames + chunk, frames.max())
    delta = progress_of[future] - progress_of
    has_progress = ~np.isnan(delta)
    mean = max(float(delta[has_progress].mean()), 0.0) if has_progress.any() else 0.0
    deviation = max(float(delta[has_progress].std()), epsilon) if has_progress.any() else epsilon
    delta = delta.astype(np.float32)
    soft = np.clip((delta - (mean - 2 * deviation)) / (4 * deviation + epsilon), 0, 1)
    weights = np.where(delta > kappa, 1.0, np.where(delta >= 0, soft, 0.0))
    return np.where(has_progress, weights, fallback).astype(np.float32)


def _of_members(
    dataset: MixedDataset, settings: SampleWeightingConfig, chunk: int, paths: Sequence[str | None]
) -> np.ndarray:
    member_paths = [*paths, *[None] * len(dataset.members)][: len(dataset.members)]
    if settings.progress_path is not None and len(dataset.members) > 1:
        raise ConfigError(
            f"sample_weighting.progress_path={settings.progress_path} is ambiguous with several datasets: give each "
            "of them a weights_path in dataset.mix."
        )
    by_frame = []
    for member, path in zip(dataset.members, member_paths):
        weights = _of_dataset(member.dataset, settings, chunk, path or settings.progress_path)
        frames = np.zeros(member.dataset.store.frames, np.float32)
        frames[member.dataset.frame_ids(np.arange(len(member.dataset)))] = weights
        by_frame.append(frames)
    return np.concatenate(by_frame)[dataset.frame_ids(np.arange(len(dataset)))]


def _of_dataset(
    dataset: Dataset, settings: SampleWeightingConfig, chunk: int, path: str | None
) -> np.ndarray:
    """The weight of each row."""
    if settings.resolved_type == "column":
        return _column(dataset, settings.column)
    frames = dataset.frame_ids(np.arange(len(dataset)))
    if settings.resolved_type == "file":
        if path is None:
            raise ConfigError(
                "sample_weighting.type=file: give the file with --sample_weighting.progress_path."
            )
        index, weight = _read(_find(dataset, path), ["index", settings.column])
        by_frame = np.full(max(int(index.max()), int(frames.max())) + 1, np.nan)
        by_frame[index] = weight
        missing = np.count_nonzero(np.isnan(by_frame[frames]))
        if missing:
            raise DatasetError(
                f"{path}: column {settings.column} has no weight for {missing} of the {len(frames)} frames of "
                f"{dataset.repo_id}. Rows are found by `index`, the number of the frame in the dataset."
            )
        return by_frame[frames]
    names = ["index", "episode_index", f"progress_{settings.head_mode}"]
    columns = _read(_find(dataset, path), names)
    extra_params = dict(settings.extra_params)
    steps = int(extra_params.pop("chunk_size", chunk))
    fallback = float(extra_params.pop("fallback_weight", 1.0))
    if extra_params:
        raise ConfigError(f"sample_weighting.extra_params has unknown names: {', '.join(extra_params)}.")
    options = {"kappa": settings.kappa, "epsilon": settings.epsilon, "fallback": fallback}
    weights = rabc_weights(columns[0], columns[1], columns[2], steps, **options)
    has_weight = frames < len(weights)
    return np.where(has_weight, weights[np.where(has_weight, frames, 0)], np.float32(fallback))


def _column(dataset: Dataset, name: str) -> np.ndarray:
    column = dataset.columns.get(name)
    if column is None or column.ndim != 1:
        numbers = [each for each, values in dataset.columns.items() if values.ndim == 1]
        raise ConfigError(
            f"sample_weighting.column={name} is no column of {dataset.repo_id} with one number per frame. It has "
            f"{', '.join(numbers)}."
        )
    return column.astype(np.float32)


def _find(dataset: Dataset, path: str | None) -> Path:
    """The file on this machine: of the dataset itself, a local one, or one at an address."""
    if path is None:
        file = dataset.source.local(PROGRESS_FILE)
        if not file.is_file():
            raise ConfigError(
                f"sample_weighting: {dataset.source} has no {PROGRESS_FILE}. Name the file with the progress of its "
                "frames with --sample_weighting.progress_path (LeRobot's compute_rabc_weights writes it)."
            )
        return file
    if "://" not in path:
        return Path(path).expanduser()
    folder, _, name = path.rpartition("/")
    on_hub = path.removeprefix("hf://datasets/").split("/", 2)
    if path.startswith("hf://datasets/") and len(on_hub) == 3:
        folder, name = f"hf://datasets/{on_hub[0]}/{on_hub[1]}", on_hub[2]
    return find_source(None, folder, None).local(name)


def _read(path: Path, columns: Sequence[str]) -> list[np.ndarray]:
    """Columns of numbers of a parquet file."""
    try:
        with pq.ParquetFile(path) as file:
            available = file.schema_arrow.names
            missing = [name for name in columns if name not in available]
            if missing:
                raise ConfigError(
                    f"{path} has no column {', '.join(missing)}: it has {', '.join(available)}. Set "
                    "--sample_weighting.head_mode or --sample_weighting.column."
                )
            table = file.read(columns=list(columns))
        dtypes = [np.int64 if name.endswith("index") else np.float64 for name in columns]
        numbers = [table[name].to_numpy().astype(dtype) for name, dtype in zip(columns, dtypes)]
    except (OSError, pa.ArrowException, ValueError, TypeError) as error:
        raise ConfigError(f"Can't read sample weights from {path}: {error}") from error
    if not len(numbers[0]) or numbers[0].min() < 0:
        raise ConfigError(
            f"{path}: `index` must be the number of a frame, from 0 on, and there must be rows."
        )
    return numbers
