"""The environment that a policy learns in: what it gives and takes, as features and limits of a policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np

from flexor.config.schema import EnvConfig
from flexor.core.batch import ACTION
from flexor.core.errors import ConfigError
from flexor.data.dataset import Dataset
from flexor.evaluate import envs
from flexor.evaluate.envs import observation_to_batch
from flexor.evaluate.rollout import task_of
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.fit import IMAGENET
from flexor.policies.processing.normalize import required_statistics
from flexor.policies.sac.config import SACConfig
from flexor.rl.spec import DEFAULT_FPS, EnvironmentSpec, observation_range

Env = gymnasium.Env[Any, Any]
Stats = dict[str, dict[str, Any]]
LIMITS = {"min", "max"}


def open_env(settings: EnvConfig) -> Env:
    """The environment, with a limit of its steps."""
    env: Env = envs.open_env(settings)
    if settings.max_steps is not None:
        return gymnasium.wrappers.TimeLimit(env, settings.max_steps)
    if env.spec is None or env.spec.max_episode_steps is None:
        raise ConfigError(
            f"{env} has no time limit of its own, so an episode might never end: set --env.max_steps."
        )
    return env


def action_limits(env: Env) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and highest action."""
    space = env.action_space
    if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
        raise ConfigError(f"{env} takes actions of {space}, but SAC acts with a vector of numbers (a Box).")
    low, high = space.low.astype(np.float32), space.high.astype(np.float32)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ConfigError(
            f"{env} has no limits of its actions ({space}), and a policy that explores needs them: wrap it in "
            "gymnasium.wrappers.RescaleAction or ClipAction with a finite Box."
        )
    return low, high


def spec_of(env: Env) -> EnvironmentSpec:
    """What is observed and done in an environment."""
    observation, _ = env.reset(seed=0)
    shapes = {name: [*value.shape] for name, value in observation_to_batch(observation).items()}
    ranges = {name: observation_range(env, name) for name, shape in shapes.items() if len(shape) == 1}
    low, high = action_limits(env)
    fps = float(env.metadata.get("render_fps") or DEFAULT_FPS)
    declared = {name: limits for name, limits in ranges.items() if limits is not None}
    return EnvironmentSpec(shapes, low.tolist(), high.tolist(), declared, fps, task_of(env))


def fitted(policy: SACConfig, spec: EnvironmentSpec) -> SACConfig:
    """The policy's settings with the features of the environment, unless it has features already."""
    inputs = policy.input_features or spec.features
    for name, feature in inputs.items():
        if spec.shapes.get(name) != [*feature.shape]:
            described = ", ".join(f"{n} {shape}" for n, shape in spec.shapes.items())
            raise ConfigError(
                f"The policy observes {name} {list(feature.shape)}, but the environment gives {described}."
            )
    actions = len(spec.low) - (policy.num_discrete_actions is not None)
    outputs = {ACTION: PolicyFeature(Kind.ACTION, (actions,))}
    fitting = replace(policy, input_features=inputs, output_features=outputs)
    fitting.validate()
    return fitting


def statistics(policy: SACConfig, spec: EnvironmentSpec, demonstrations: Dataset | None) -> Stats:
    """What observations and actions are normalised by: what was given, the environment's limits, or the data's."""
    actions = policy.action.shape[0]
    stats: Stats = {ACTION: {"min": spec.low[:actions], "max": spec.high[:actions]}}
    from_user = policy.dataset_stats or {}
    for name, feature in policy.observed.items():
        names = required_statistics(policy.normalization_mapping.get(feature.type, "IDENTITY"))
        stats[name] = from_user.get(name) or _of_feature(name, feature, names, spec, demonstrations)
    return stats


def _of_feature(
    name: str, feature: PolicyFeature, names: tuple[str, ...], spec: EnvironmentSpec, data: Dataset | None
) -> dict[str, Any]:
    if feature.type is Kind.VISUAL:
        return dict(IMAGENET)
    if {*names} <= LIMITS and name in spec.ranges:
        low, high = spec.ranges[name]
        return {"min": low, "max": high}
    if data is not None and name in data.stats:
        recorded = {key: np.asarray(data.stats[name][key], np.float32) for key in names}
        return {key: value.tolist() for key, value in _with_spread(recorded).items()}
    if not names:
        return {}
    raise ConfigError(
        f"The environment does not say in which range {name} is, and there are no demonstrations: give "
        f"--policy.dataset_stats='{{{name}: {{min: [...], max: [...]}}, ...}}', or a dataset with --dataset.repo_id or "
        "--dataset.root."
    )


def _with_spread(stats: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A value that never changed in the demonstrations may change later: it is not divided by nothing."""
    if {*stats} == LIMITS:
        same = stats["min"] == stats["max"]
        return {"min": stats["min"] - same, "max": stats["max"] + same}
    if "std" in stats:
        return {**stats, "std": np.where(stats["std"] == 0, 1, stats["std"])}
    return stats
