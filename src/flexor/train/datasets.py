"""From settings to the data of a run: the datasets, which episodes are held out, and the weights of samples."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from flexor.config.schema import TrainConfig
from flexor.core.errors import ConfigError
from flexor.data.dataset import Dataset, open_dataset
from flexor.data.format.episode_list import checked_episodes
from flexor.data.mixture.entries import entries_of, parse_episode_weights
from flexor.data.mixture.mixed import Member, MixedDataset, join_datasets
from flexor.data.mixture.sample_weights import with_weights
from flexor.data.settings import DatasetConfig, DatasetEntry, parse_image_size
from flexor.data.statistics import with_own_stats
from flexor.sim.record import BUILTIN, builtin_dataset


def build_datasets(config: DatasetConfig) -> tuple[Dataset, Dataset | None]:
    """The episodes to train on, and those held out."""
    entries = entries_of(config)
    dataset = _open_entry(entries[0], config)
    if len(entries) > 1 or entries[0].rename_map or entries[0].episode_weights or config.rename_map:
        opened = [dataset, *(_open_entry(entry, config) for entry in entries[1:])]
        entries = _with_shared_names(entries, opened, config.rename_map)
        members = [_as_member(*pair) for pair in zip(entries, opened)]
        dataset = join_datasets(
            members,
            on_missing_camera=config.on_missing_camera,
            allow_different_fps=config.allow_different_fps,
        )
    if not config.eval_split:
        return dataset, None
    training, held_out = split_episodes(dataset, config.eval_split)
    return dataset.select(training), dataset.select(held_out)


def _with_shared_names(
    entries: list[DatasetEntry], datasets: list[Dataset], names: dict[str, str]
) -> list[DatasetEntry]:
    """The entries with the names of `dataset.rename_map`: each dataset must have one, or at least one of several."""
    for old in names:
        if not any(old in dataset.features for dataset in datasets):
            features = "; ".join(
                f"{dataset.repo_id} has {', '.join(dataset.features)}" for dataset in datasets
            )
            raise ConfigError(f"rename_map: no dataset has a feature {old!r}: {features}.")
    return [
        replace(entry, rename_map={**_present(names, dataset), **entry.rename_map})
        for entry, dataset in zip(entries, datasets)
    ]


def _present(names: dict[str, str], dataset: Dataset) -> dict[str, str]:
    return {old: new for old, new in names.items() if old in dataset.features}


def _open_entry(entry: DatasetEntry, config: DatasetConfig) -> Dataset:
    root: str | Path | None = entry.root
    if root is None and entry.repo_id in BUILTIN:
        root = builtin_dataset(entry.repo_id)
    dataset = open_dataset(
        entry.repo_id,
        root,
        entry.revision,
        entry.episodes,
        streaming=config.streaming,
        size=parse_image_size(config.cache.size),
        remote_bytes=None if config.cache.remote_gb is None else int(config.cache.remote_gb * 1e9),
        exclude_episodes=entry.exclude_episodes,
        frame_by=config.frame_by,
        on_bad_episode=config.on_bad_episode,
        tasks=entry.tasks,
        depth_unit=config.depth_output_unit,
    )
    return with_own_stats(dataset)


def _as_member(entry: DatasetEntry, dataset: Dataset) -> Member:
    weights = {}
    if entry.episode_weights:
        count = len(dataset.store.ends)
        weights = parse_episode_weights(entry.episode_weights, count, "dataset.episode_weights")
        checked_episodes(list(weights), np.arange(count), str(entry.name), "episode_weights")
    return Member(str(entry.name), dataset, entry.weight, entry.rename_map, weights)


def weigh_samples(config: TrainConfig, dataset: Dataset) -> Dataset:
    """The dataset with the weights of its samples in the loss, if the run has any."""
    chunk = getattr(config.policy, "chunk_size", len(config.policy.action_deltas))
    paths = [entry.weights_path for entry in entries_of(config.dataset)]
    return with_weights(dataset, config.sample_weighting, chunk, paths)


def split_episodes(dataset: Dataset, share: float) -> tuple[list[int], list[int]]:
    """The last episodes of each task of each dataset are held out, as LeRobot holds them out."""
    by_task: dict[tuple[int, str], list[int]] = {}
    index = dataset.episodes.index
    member = dataset.member_of(index) if isinstance(dataset, MixedDataset) else np.zeros(len(index), int)
    for episode, number, tasks in zip(index.tolist(), member.tolist(), dataset.episodes.tasks):
        by_task.setdefault((number, tasks[0] if tasks else ""), []).append(episode)
    training: list[int] = []
    held_out: list[int] = []
    for episodes in by_task.values():
        cut = len(episodes) - math.ceil(len(episodes) * share)
        training += episodes[:cut]
        held_out += episodes[cut:]
    if not training:
        raise ConfigError(
            f"dataset.eval_split={share} holds out all {len(held_out)} episodes: use a smaller value."
        )
    if isinstance(dataset, MixedDataset):
        left = {*dataset.member_of(np.array(training)).tolist()}
        if lost := ", ".join(name for number, name in enumerate(dataset.names) if number not in left):
            raise ConfigError(
                f"dataset.eval_split={share} holds out all episodes of {lost}: use a smaller value."
            )
    return training, held_out
