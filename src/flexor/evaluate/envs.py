"""Creates any gymnasium environment, and gives its observations the names of LeRobot datasets."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np

import flexor.sim  # noqa: F401  (registers the built-in task)
from flexor.config.environment import EndEffectorSettings, EnvConfig, EnvProcessor, GripperSettings
from flexor.core.errors import ConfigError, FlexorError
from flexor.evaluate.env_steps import with_steps
from flexor.sim import hil
from flexor.sim.task import ENV_ID

# The names that `lerobot-train --env.type` supports, with the arguments that LeRobot passes for them.
SHORT_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "place": (ENV_ID, {}),
    "pusht": ("gym_pusht/PushT-v0", {"obs_type": "pixels_agent_pos", "max_episode_steps": 300}),
    "aloha": ("gym_aloha/AlohaInsertion-v0", {"obs_type": "pixels_agent_pos", "max_episode_steps": 400}),
    "xarm": ("gym_xarm/XarmLift-v0", {"obs_type": "pixels_agent_pos", "max_episode_steps": 200}),
    "gym_hil": (f"{hil.PACKAGE}/{hil.TASK}", {"image_obs": True}),
}
EXTRAS = {"gym_pusht": "sim", "gym_hil": "hil"}  # of Flexor, with these packages


def check_env(env_type: str, task: str | None = None, package: str | None = None) -> None:
    """Refuse an environment that is not on this machine, without making one."""
    env_id = _env_id(env_type, task)
    if package is not None or env_id not in gymnasium.registry:
        _import_package(env_id, package)
    if env_id not in gymnasium.registry:
        raise ConfigError(_unknown(env_type))


def _env_id(env_type: str, task: str | None) -> str:
    env_id = SHORT_NAMES[env_type][0] if env_type in SHORT_NAMES else env_type
    return env_id if task is None else f"{env_id.split('/')[0]}/{task}"


def make_env(
    env_type: str, *, task: str | None = None, package: str | None = None, **kwargs: Any
) -> gymnasium.Env[Any, Any]:
    """An environment by short name ("place", "pusht") or gymnasium id ("gym_pusht/PushT-v0").

    `task` names another environment of the same package, like LeRobot's `--env.task`. `package` is
    imported first, so that it can register its environments; for an id with a namespace it defaults to
    the namespace. Other arguments are passed to the environment.
    """
    env_id, defaults = _env_id(env_type, task), SHORT_NAMES.get(env_type, ("", {}))[1]
    is_hil = env_id.startswith(f"{hil.PACKAGE}/")
    if is_hil:
        hil.render_without_screen()
        defaults = {**hil.arguments(env_id), **defaults}
    check_env(env_type, task, package)
    settings = {"render_mode": "rgb_array", **defaults, **kwargs}
    try:
        # gymnasium's checker warns about every unusual observation; Flexor checks observations below.
        env = gymnasium.make(env_id, disable_env_checker=True, **settings)
    except TypeError as error:
        raise ConfigError(f"{env_id} does not accept the settings {settings}: {error}") from error
    except gymnasium.error.Error as error:
        raise ConfigError(f"{env_id} can't be created with the settings {settings}: {error}") from error
    return hil.GymHIL(env) if is_hil else env


def open_env(settings: EnvConfig) -> gymnasium.Env[Any, Any]:
    """The environment of a run, with the steps between it and the policy."""
    assert settings.type is not None
    kwargs, processor = dict(settings.kwargs), settings.processor
    if settings.type.startswith(hil.PACKAGE):
        kwargs, processor = _computed_by_gym_hil(kwargs, processor)
    env = make_env(settings.type, task=settings.task, package=settings.package, **kwargs)
    return with_steps(env, processor)


def _computed_by_gym_hil(
    kwargs: dict[str, Any], processor: EnvProcessor
) -> tuple[dict[str, Any], EnvProcessor]:
    """gym_hil has penalties of its gripper and steps of its arm itself: they become arguments of it."""
    penalty, steps = (
        processor.gripper.gripper_penalty,
        processor.inverse_kinematics.end_effector_step_sizes,
    )
    kwargs = {**({"gripper_penalty": penalty} if penalty else {}), **kwargs}
    kwargs = {**({"ee_step_size": steps} if steps else {}), **kwargs}
    return kwargs, replace(processor, gripper=GripperSettings(), inverse_kinematics=EndEffectorSettings())


def _import_package(env_id: str, package: str | None) -> None:
    """Import the package that registers an environment; raise an error only if it was given explicitly."""
    name = package or (env_id.split("/")[0] if "/" in env_id else None)
    if name is None:
        return
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        builtin = env_id in {short_id for short_id, _ in SHORT_NAMES.values()}
        if package is None and error.name == name and not builtin:
            return
        raise ConfigError(_needs_package(env_id, error.name or name)) from error


def _needs_package(env_id: str, package: str) -> str:
    extra = EXTRAS.get(package)
    install = f"'flexor[{extra}]'" if extra else package.replace("_", "-")
    return f"The environment {env_id} needs the Python package {package}, which is not installed: pip install {install}"


def _unknown(env_type: str) -> str:
    """The error message for an id that is not registered."""
    registered = [*SHORT_NAMES, *gymnasium.registry]
    by_folded = {name.casefold(): name for name in registered}
    close = [by_folded[m] for m in difflib.get_close_matches(env_type.casefold(), by_folded, n=3, cutoff=0.6)]
    lines = [f"There is no environment {env_type!r}."]
    if close:
        lines.append(f"Similar names: {', '.join(close)}.")
    lines.append(f"Built-in: {ENV_ID!r} (short: 'place').")
    namespace = env_type.split("/")[0] if "/" in env_type else None
    if namespace and namespace != "flexor":
        lines.append(f"Its package may be missing: pip install {namespace.replace('_', '-')}.")
    lines.append("For your own environment, give the package that registers it: --env.package=your_package.")
    return " ".join(lines)


def observation_to_batch(observation: Any) -> dict[str, np.ndarray]:
    """One observation under LeRobot's names, without a batch dimension; images as uint8 [C, H, W].

    pixels -> observation.image, pixels {camera: image} -> observation.images.{camera},
    agent_pos -> observation.state, environment_state -> observation.environment_state, any other
    key -> observation.{key}. An observation that is one array is an image or a state by its shape.
    """
    if not isinstance(observation, Mapping):
        array = np.asarray(observation)
        if array.ndim == 3:
            return {"observation.image": _image("the observation", array)}
        return {"observation.state": _vector("the observation", array)}
    batch: dict[str, np.ndarray] = {}
    for key, value in observation.items():
        if key == "pixels" and isinstance(value, Mapping):
            for camera, picture in value.items():
                batch[f"observation.images.{camera}"] = _image(f"pixels[{camera!r}]", picture)
        elif key == "pixels":
            batch["observation.image"] = _image("pixels", value)
        else:
            name = "state" if key == "agent_pos" else key
            batch[f"observation.{name}"] = _vector(key, value)
    return batch


def stack_batch(observations: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Observations of several environments as one batch: arrays [N, ...]."""
    return {key: np.stack([observation[key] for observation in observations]) for key in observations[0]}


def _image(name: str, value: Any) -> np.ndarray:
    """An image as uint8 [channels, height, width]."""
    array = np.asarray(value)
    if array.dtype != np.uint8 or array.ndim != 3:
        raise FlexorError(
            f"{name} of the environment is {array.dtype} of shape {list(array.shape)}, not a uint8 image "
            "[height, width, 3]; wrap the environment in a gymnasium.ObservationWrapper that converts it"
        )
    if array.shape[-1] in (1, 3):
        return np.ascontiguousarray(array.transpose(2, 0, 1))
    if array.shape[0] in (1, 3):
        return np.ascontiguousarray(array)
    raise FlexorError(
        f"{name} of the environment has shape {list(array.shape)}, without 1 or 3 channels first or last; "
        "keep the red, green and blue channels with a gymnasium.ObservationWrapper"
    )


def _vector(name: str, value: Any) -> np.ndarray:
    """A vector as float32 [dimension]."""
    try:
        array = np.asarray(value, np.float32)
    except (TypeError, ValueError) as error:
        raise FlexorError(
            f"{name!r} of the environment's observation is a {type(value).__name__}, not numbers; "
            "flatten it with gymnasium.wrappers.FlattenObservation or leave it out with FilterObservation"
        ) from error
    return np.atleast_1d(array)
