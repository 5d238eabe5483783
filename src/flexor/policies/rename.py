"""`rename_map`: a dataset's names of observations -> the policy's, as LeRobot's setting of this name.

The dataset, its cache and its loader keep the dataset's names. The first processing step renames a batch. It is saved
with the policy, so that the policy later takes observations under either name. Features that are no observations, such
as `actions`, are renamed in the dataset instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from flexor.core.batch import ACTION, ENV_STATE, IMAGE_PREFIX
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.typed import closest
from flexor.policies.base import PolicyConfig
from flexor.policies.features import Kind, PolicyFeature

OBSERVATION, NEXT = "observation.", "next."
Features = dict[str, PolicyFeature]


def split_renames(rename_map: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The names that a policy's processing changes, which are observations', and those that the dataset changes."""
    for_policy = {
        source: target
        for source, target in rename_map.items()
        if source.startswith(OBSERVATION) and target.startswith(OBSERVATION)
    }
    for_dataset = {source: target for source, target in rename_map.items() if source not in for_policy}
    for source, target in for_dataset.items():
        wrong = source if source == ACTION and target.startswith(OBSERVATION) else target
        if not target.startswith((OBSERVATION, ACTION, NEXT)) or wrong == source:
            raise ConfigError(
                f"rename_map={{{source}: {target}}}: {wrong!r} is not an observation. Policies use observations, in "
                f"full, and {ACTION}: {{image: observation.images.top, actions: action}}."
            )
    return for_policy, for_dataset


def check_names(rename_map: Mapping[str, str]) -> None:
    """Refuse a map that is wrong for any dataset."""
    for source, target in rename_map.items():
        for name in (source, target):
            if not name.startswith(OBSERVATION):
                raise ConfigError(
                    f"rename_map={{{source}: {target}}}: {name!r} is not an observation. Only names that start with "
                    f"{OBSERVATION!r} can be renamed, in full: {{observation.images.top: observation.images.camera1}}."
                )
    twice = [target for target, times in Counter(rename_map.values()).items() if times > 1]
    for target in twice:
        sources = [source for source in rename_map if rename_map[source] == target]
        raise ConfigError(
            f"rename_map maps {' and '.join(sources)} to the same name {target}: keep one of them."
        )


def rename_features(features: Features, rename_map: Mapping[str, str], policy: PolicyConfig) -> Features:
    """A dataset's observations under the policy's names. Refuses a map that does not fit both."""
    check_names(rename_map)
    for source, target in rename_map.items():
        if source not in features:
            raise ConfigError(
                f"rename_map maps {source} to {target}, but the dataset has no {source}. {closest(source, features)}"
            )
        if target in features and target not in rename_map:
            raise ConfigError(
                f"rename_map maps {source} to {target}, but the dataset has its own {target}. Rename that one too, "
                f"such as {{{target}: {target}_unused}}, or choose another target."
            )
        _check_target(source, features[source], target, policy)
    return {
        rename_map.get(name, name): _with_role_of(rename_map.get(name, name), feature)
        for name, feature in features.items()
    }


def _check_target(source: str, feature: PolicyFeature, target: str, policy: PolicyConfig) -> None:
    camera = feature.type is Kind.VISUAL
    if camera != target.startswith(IMAGE_PREFIX):
        kind, needed = ("a camera", "must start with") if camera else ("not a camera", "can't start with")
        raise ConfigError(
            f"rename_map maps {source} to {target}: {source} is {kind}, so its name {needed} {IMAGE_PREFIX!r}."
        )
    policy_inputs = policy.input_features
    # a feature with a name of the policy may get another one
    if policy_inputs and target not in policy_inputs and source not in policy_inputs:
        raise ConfigError(
            f"rename_map maps {source} to {target}, but the policy has no {target}. {closest(target, policy_inputs)}"
        )


def _with_role_of(name: str, feature: PolicyFeature) -> PolicyFeature:
    """The feature with the role that this name has."""
    if feature.type is Kind.VISUAL:
        return feature
    return replace(feature, type=Kind.ENV if name == ENV_STATE else Kind.STATE)


def without_unnamed_cameras(
    features: Features, rename_map: Mapping[str, str], policy: PolicyConfig
) -> Features:
    """The features without cameras that `rename_map` does not give to the policy, if it gives it any, as in LeRobot."""
    cameras = policy.images
    if not any(target in cameras for target in rename_map.values()):
        return features
    unused = [
        name for name, feature in features.items() if feature.type is Kind.VISUAL and name not in cameras
    ]
    sources = {target: source for source, target in rename_map.items()}
    for name in unused:
        log.info(
            "the dataset's %s is not used: rename_map maps it to no camera of the policy",
            sources.get(name, name),
        )
    return {name: feature for name, feature in features.items() if name not in unused}


def in_dataset(names: Iterable[str], rename_map: Mapping[str, str]) -> list[str]:
    """The dataset's names of what the policy calls `names`."""
    sources = {target: source for source, target in rename_map.items()}
    return [sources.get(name, name) for name in names]
