"""From settings to the parts of a run: dataset, policy, processing, optimizer."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import torch

from flexor.batch import ACTION
from flexor.config import TrainConfig
from flexor.data.dataset import Dataset, open_dataset
from flexor.data.loader import Loader
from flexor.data.settings import DatasetConfig, picture_size
from flexor.data.stats import compute_stats
from flexor.data.tiers import open_loader
from flexor.errors import ConfigError
from flexor.log import log
from flexor.policies import policy_class
from flexor.policies.base import Kind, Policy, PolicyConfig, PolicyFeature
from flexor.policies.pretrained import find_folder, load_weights
from flexor.policies.processing import Pipeline, Stats, default_pipelines
from flexor.rng import seed_everything
from flexor.sim.record import BUILTIN, builtin_dataset
from flexor.train.engine import Engine
from flexor.train.optim import EMA, build_optimizer, build_scheduler
from flexor.train.state import TrainState

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


def build_datasets(config: DatasetConfig) -> tuple[Dataset, Dataset | None]:
    """The episodes to train on, and those held out."""
    root: str | Path | None = config.root
    if root is None and config.repo_id == BUILTIN:
        root = builtin_dataset()
    dataset = open_dataset(
        config.repo_id,
        root,
        config.revision,
        config.episodes,
        streaming=config.streaming,
        size=picture_size(config.cache.size),
        remote_bytes=None if config.cache.remote_gb is None else int(config.cache.remote_gb * 1e9),
    )
    if not config.eval_split:
        return dataset, None
    training, held_out = split_episodes(dataset, config.eval_split)
    return dataset.select(training), dataset.select(held_out)


def build_loader(config: TrainConfig, training: Dataset, held_out: Dataset | None, engine: Engine) -> Loader:
    """The batches of the run. What is left open about their order is settled here, for all of the run."""
    return open_loader(
        training,
        config.dataset,
        deltas_of(config.policy),
        cameras=list(config.policy.images),
        batch_size=config.batch_size,
        accumulation=config.gradient_accumulation_steps,
        seed=config.seed,
        num_workers=config.num_workers,
        rank=engine.rank,
        world_size=engine.world_size,
        device=engine.device,
        drop_last_frames=config.policy.drop_last_frames,
        also=[held_out] if held_out is not None else [],
    )


def split_episodes(dataset: Dataset, share: float) -> tuple[list[int], list[int]]:
    """The last episodes of each task are held out, as LeRobot holds them out."""
    by_task: dict[str, list[int]] = {}
    for index, tasks in zip(dataset.episodes.index.tolist(), dataset.episodes.tasks):
        by_task.setdefault(tasks[0] if tasks else "", []).append(index)
    training: list[int] = []
    held_out: list[int] = []
    for episodes in by_task.values():
        cut = len(episodes) - math.ceil(len(episodes) * share)
        training += episodes[:cut]
        held_out += episodes[cut:]
    if not training:
        raise ConfigError(f"dataset.eval_split={share} leaves none of {len(held_out)} episodes to train on.")
    return training, held_out


def features_of(dataset: Dataset) -> tuple[dict[str, PolicyFeature], dict[str, PolicyFeature]]:
    """What a policy on this dataset observes and puts out."""
    inputs: dict[str, PolicyFeature] = {}
    outputs: dict[str, PolicyFeature] = {}
    for name, feature in dataset.features.items():
        if feature.is_camera:
            inputs[name] = PolicyFeature(Kind.VISUAL, tuple(feature.chw))
        elif name == "observation.environment_state":
            inputs[name] = PolicyFeature(Kind.ENV, tuple(feature.shape))
        elif name.startswith("observation.") and feature.is_numeric:
            inputs[name] = PolicyFeature(Kind.STATE, tuple(feature.shape))
        elif name.startswith(ACTION) and feature.is_numeric:
            outputs[name] = PolicyFeature(Kind.ACTION, tuple(feature.shape))
    if ACTION not in outputs:
        raise ConfigError(
            f"{dataset.repo_id} has no {ACTION!r} to learn; it has {', '.join(dataset.features)}."
        )
    return inputs, outputs


def fit_to_dataset(policy: PolicyConfig, dataset: Dataset) -> PolicyConfig:
    """The policy's settings with its features filled in, or checked if it has some already."""
    inputs, outputs = features_of(dataset)
    policy = dataclasses.replace(
        policy,
        input_features=policy.input_features or inputs,
        output_features=policy.output_features or outputs,
    )
    there = {**inputs, **outputs}
    for name, feature in {**policy.observed, ACTION: policy.action}.items():
        if name not in there:
            near = ", ".join(there)
            raise ConfigError(f"The policy needs {name}, which the dataset does not have; it has {near}.")
        if tuple(there[name].shape) != tuple(feature.shape):
            raise ConfigError(
                f"{name} is {list(there[name].shape)} in the dataset, but {list(feature.shape)} in the policy: "
                "resize the dataset, or train a policy of its own for it."
            )
    policy.validate()
    return policy


def deltas_of(policy: PolicyConfig) -> dict[str, list[int]]:
    """Which steps of which feature make up a sample."""
    deltas = dict.fromkeys(policy.output_features, policy.action_deltas)
    if policy.observation_deltas is not None:
        deltas |= dict.fromkeys(policy.input_features, policy.observation_deltas)
    return deltas


def statistics(dataset: Dataset, policy: PolicyConfig, use_imagenet: bool) -> Stats:
    """The dataset's statistics for the policy's features, computed where they are missing."""
    features = {**policy.input_features, **policy.output_features}
    cameras = [name for name in policy.images if use_imagenet]
    missing = [name for name in features if name not in dataset.stats and name not in cameras]
    if missing:
        log.info("computing statistics that the dataset lacks: %s", ", ".join(missing))
    computed = compute_stats(dataset, missing) if missing else {}
    stats: dict[str, dict[str, np.ndarray]] = {
        name: dict({**dataset.stats, **computed}.get(name, {})) for name in features
    }
    for name in cameras:
        stats[name] |= {key: np.array(value).reshape(3, 1, 1) for key, value in IMAGENET.items()}
    return stats


def build_policy(config: TrainConfig, device: torch.device, resuming: bool = False) -> Policy:
    """A policy with its starting weights, the same for the same seed."""
    seed_everything("weights", config.seed)
    policy = policy_class(config.policy.type)(config.policy)
    if resuming:
        pass  # a checkpoint brings all weights: nothing needs to be fetched
    elif config.policy_path is not None:
        load_weights(policy, find_folder(config.policy_path))
    else:
        policy.load_backbone()
    return policy.to(device)


def build_state(config: TrainConfig, dataset: Dataset, engine: Engine, resuming: bool = False) -> TrainState:
    """Everything at step 0. Fills in the policy's features: from here on the config alone says what the run is."""
    config.policy = fit_to_dataset(config.policy, dataset)
    before, after = _pipelines(config, dataset, engine)
    policy = build_policy(config, engine.device, resuming)
    optimizer = build_optimizer(config.optimizer, policy)
    return TrainState(
        config=config,
        fingerprint=dataset.fingerprint(),
        engine=engine,
        policy=policy,
        preprocessor=before,
        postprocessor=after,
        optimizer=optimizer,
        scheduler=build_scheduler(config.scheduler, optimizer, config.steps),
        ema=EMA(policy, config.ema.decay) if config.ema.enable else None,
    )


def _pipelines(config: TrainConfig, dataset: Dataset, engine: Engine) -> tuple[Pipeline, Pipeline]:
    stats = statistics(dataset, config.policy, config.dataset.use_imagenet_stats)
    return default_pipelines(config.policy, stats, str(engine.device))
