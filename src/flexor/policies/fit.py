"""Fits a policy to a dataset: features, the time steps of a sample, statistics for normalisation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from flexor.core.batch import ACTION, ENV_STATE, IMAGE_PREFIX, REWARD, STATE
from flexor.core.console import progress
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.data.dataset import Dataset
from flexor.data.format.common_names import rename_flag, suggested_names
from flexor.data.format.flat_names import flat_names
from flexor.data.format.stats import QUANTILES
from flexor.data.mixture.mixed import MixedDataset, without_padding
from flexor.data.statistics import (
    compute_stats,
    relative_action_stats,
    relative_action_stats_by_step,
    true_quantiles,
)
from flexor.policies.base import PolicyConfig
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.processing.normalize import required_statistics
from flexor.policies.processing.pipeline import Stats
from flexor.policies.processing.relative_actions import BY_STEP, RelativeActionSettings
from flexor.policies.rename import in_dataset, rename_features, without_unnamed_cameras

NONE_RENAMED: Mapping[str, str] = {}
IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


def features_of(dataset: Dataset) -> tuple[dict[str, PolicyFeature], dict[str, PolicyFeature]]:
    """The inputs and outputs of a policy on this dataset."""
    inputs: dict[str, PolicyFeature] = {}
    outputs: dict[str, PolicyFeature] = {}
    for name, feature in dataset.features.items():
        if feature.is_camera:
            inputs[name] = PolicyFeature(Kind.VISUAL, tuple(feature.chw))
        elif name == ENV_STATE:
            inputs[name] = PolicyFeature(Kind.ENV, tuple(feature.shape))
        elif name.startswith("observation.") and feature.is_numeric:
            inputs[name] = PolicyFeature(Kind.STATE, tuple(feature.shape))
        elif name.startswith(ACTION) and feature.is_numeric:
            outputs[name] = PolicyFeature(Kind.ACTION, tuple(feature.shape))
    names = suggested_names(dataset.features)
    if ACTION not in outputs:
        advice = f" If it has other names for them, give {rename_flag(names)}." if names else ""
        raise ConfigError(
            f"{dataset.repo_id} has no {ACTION!r} to learn; it has {', '.join(dataset.features)}.{advice}"
        )
    for name in names:
        if not dataset.features[name].is_camera:
            text = "the dataset's %s is not used: policies take %s. If it is that, give %s"
            log.warning(text, name, names[name], rename_flag({name: names[name]}))
    return inputs, outputs


def fit_to_dataset(
    policy: PolicyConfig, dataset: Dataset, rename_map: Mapping[str, str] = NONE_RENAMED
) -> PolicyConfig:
    """The policy's settings with the dataset's features. If the policy already has features, they are checked."""
    inputs, outputs = features_of(dataset)
    inputs = rename_features(_supported_inputs(policy, dataset, inputs), rename_map, policy)
    inputs = without_unnamed_cameras(inputs, rename_map, policy)
    _check_cameras(policy, inputs, dataset)
    if policy.reward_deltas is not None and REWARD not in dataset.features:
        raise ConfigError(
            f"policy.type={policy.type} learns from rewards, but {dataset.repo_id} has no column {REWARD!r}. Record "
            "a reward with each frame, or train a policy that imitates the actions, such as --policy.type=act."
        )
    _check_padding(policy, dataset)
    policy = policy.fitted(inputs, outputs)
    if isinstance(policy, RelativeActionSettings) and ACTION in outputs:
        names = flat_names(dataset.features[ACTION].names, outputs[ACTION].shape[0])
        changes: dict[str, Any] = {"action_feature_names": names or policy.action_feature_names}
        policy = dataclasses.replace(policy, **changes)
    available = {**inputs, **outputs}
    for name, feature in {**policy.observed, ACTION: policy.action}.items():
        if name not in available:
            raise ConfigError(
                f"The policy requires {name}, but the dataset has only {', '.join(available)}. If it is there under "
                f"another name, give --rename_map='{{NAME: {name}}}'."
            )
        if tuple(available[name].shape) != tuple(feature.shape):
            raise ConfigError(
                f"{name} is {list(available[name].shape)} in the dataset, but {list(feature.shape)} in the policy: "
                "resize the dataset, or train a new policy on it."
            )
    policy.validate()
    policy.check_columns(dataset.columns)
    return policy


def _check_cameras(policy: PolicyConfig, inputs: Mapping[str, PolicyFeature], dataset: Dataset) -> None:
    """Policies tell cameras from other inputs by their names."""
    cameras = [name for name, feature in inputs.items() if feature.type is Kind.VISUAL]
    wrong = [name for name in cameras if not name.startswith(IMAGE_PREFIX)]
    if wrong and not policy.input_features:
        raise ConfigError(
            f"{dataset.repo_id}: the names of cameras must begin with {IMAGE_PREFIX!r}, but it has {', '.join(wrong)}. "
            f"Give {rename_flag(suggested_names(dataset.features))}."
        )


def _check_padding(policy: PolicyConfig, dataset: Dataset) -> None:
    """Datasets with states or actions of different lengths: only for policies that pad them themselves."""
    if not isinstance(dataset, MixedDataset):
        return
    for name, setting in ((STATE, "max_state_dim"), (ACTION, "max_action_dim")):
        if name in dataset.schema.padded and not hasattr(policy, setting):
            raise ConfigError(
                f"{name} has different lengths in the datasets ({dataset.schema.padded[name]}), and policy.type="
                f"{policy.type} supports only one. Policies that pad them are pi0, pi05, pi0_fast, smolvla, eo1, "
                "xvla, groot and wall_x."
            )
    if dataset.schema.blank and not policy.reads_camera_masks:
        log.warning(
            "policy.type=%s does not ignore missing cameras: it gets black images of %s",
            *(policy.type, ", ".join(dataset.schema.blank)),
        )


def _supported_inputs(
    policy: PolicyConfig, dataset: Dataset, inputs: dict[str, PolicyFeature]
) -> dict[str, PolicyFeature]:
    """The inputs of the policy: without depth maps, unless it supports them."""
    depth = [name for name in inputs if dataset.features[name].depth is not None]
    if not depth or policy.takes_depth or policy.input_features:
        return inputs
    log.info("%s is not used: policy.type=%s takes colour images only", ", ".join(depth), policy.type)
    return {name: feature for name, feature in inputs.items() if name not in depth}


def deltas_of(policy: PolicyConfig, rename_map: Mapping[str, str] = NONE_RENAMED) -> dict[str, list[int]]:
    """The time steps of each feature in a sample, by the dataset's names."""
    deltas = dict.fromkeys(policy.output_features, policy.action_deltas)
    if policy.observation_deltas is not None:
        deltas |= dict.fromkeys(in_dataset(policy.input_features, rename_map), policy.observation_deltas)
    if policy.reward_deltas is not None:
        deltas[REWARD] = policy.reward_deltas
    return deltas


def sample_of(policy: PolicyConfig, rename_map: Mapping[str, str]) -> tuple[list[str], dict[str, list[int]]]:
    """The cameras of a sample and the time steps of each feature, by the dataset's names."""
    return in_dataset(policy.images, rename_map), deltas_of(policy, rename_map)


def statistics(
    dataset: Dataset, policy: PolicyConfig, use_imagenet: bool, rename_map: Mapping[str, str] = NONE_RENAMED
) -> Stats:
    """The dataset's statistics for the policy's features, by the policy's names. Missing ones are computed.

    Quantiles that the policy normalises by are computed too: recorded ones are averages of the episodes' quantiles.
    """
    features = {**policy.input_features, **policy.output_features}
    dataset_names = dict(zip(features, in_dataset(features, rename_map)))
    depth = {name for name, feature in dataset.features.items() if feature.depth is not None}
    cameras = [name for name in policy.images if use_imagenet and dataset_names[name] not in depth]
    stats: dict[str, dict[str, np.ndarray]] = {
        name: dict(dataset.stats.get(dataset_names[name], {})) for name in features
    }
    for name in cameras:
        stats[name] |= {key: np.array(value).reshape(3, 1, 1) for key, value in IMAGENET.items()}
    relative = isinstance(policy, RelativeActionSettings) and policy.use_relative_actions
    if relative:
        by_step = isinstance(policy, RelativeActionSettings) and policy.relative_by_step
        stats[BY_STEP if by_step else ACTION] = _relative_stats(
            dataset, policy, dataset_names.get(STATE, STATE)
        )
    for name in [name for name in features if _uses_quantiles(policy, features[name])]:
        if dataset_names[name] in dataset.columns and not (name == ACTION and relative):
            stats[name] |= true_quantiles(without_padding(dataset, dataset_names[name]))
    missing = {name: keys for name in features if (keys := _missing(policy, features[name], stats[name]))}
    if missing:
        listed = "; ".join(f"{dataset_names[name]} ({', '.join(keys)})" for name, keys in missing.items())
        log.info("computing statistics that are missing in the dataset: %s", listed)
        computed = compute_stats(dataset, [dataset_names[name] for name in missing], progress("statistics"))
        stats |= {name: {**computed[dataset_names[name]], **stats[name]} for name in missing}
    return stats


def _uses_quantiles(policy: PolicyConfig, feature: PolicyFeature) -> bool:
    return any(name in QUANTILES for name in required_statistics(_mode(policy, feature)))


def _mode(policy: PolicyConfig, feature: PolicyFeature) -> str:
    return policy.normalization_mapping.get(feature.type, "IDENTITY")


def _missing(policy: PolicyConfig, feature: PolicyFeature, stats: Mapping[str, np.ndarray]) -> list[str]:
    """The statistics that a feature's normalisation requires and the dataset does not have."""
    return [name for name in required_statistics(_mode(policy, feature)) if name not in stats]


def _relative_stats(dataset: Dataset, policy: PolicyConfig, state_name: str) -> dict[str, np.ndarray]:
    """Statistics of relative actions, computed: the dataset has those of absolute actions."""
    assert isinstance(policy, RelativeActionSettings)
    step, actions = policy.relative_actions(), policy.action.shape[0]
    state = dataset.features.get(state_name)
    step.check(actions, state.shape[0] if state is not None else 0)
    chunk = len(policy.action_deltas)
    log.info("computing statistics of actions relative to the state, over chunks of %d steps", chunk)
    compute = relative_action_stats_by_step if policy.relative_by_step else relative_action_stats
    return compute(dataset, step.relative(actions), chunk, progress("statistics"), state_name=state_name)
