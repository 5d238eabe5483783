"""The steps of LeRobot's environment pipeline, as gymnasium wrappers: the same in training, evaluation and records."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from PIL import Image

from flexor.config.environment import EndEffectorSettings, EnvProcessor, ImagePreprocessing, ResetSettings
from flexor.core.errors import ConfigError

Env = gymnasium.Env[Any, Any]
Wrapper = gymnasium.Wrapper[Any, Any, Any, Any]
DEFAULT_FPS = 10.0  # of an environment that does not say
IMAGE, IMAGES = "observation.image", "observation.images."
CLOSE, OPEN = 0.0, 2.0  # a gripper's choices; 1 is to stay


def with_steps(env: Env, settings: EnvProcessor) -> Env:
    """The environment with the steps that the settings ask for."""
    if settings.gripper.gripper_penalty:
        env = GripperPenalty(env, settings)
    if settings.inverse_kinematics.end_effector_step_sizes:
        env = DeltaActions(env, settings.inverse_kinematics)
    images = settings.image_preprocessing
    if images.crop_params_dict or images.resize_size:
        env = CropAndResize(env, images)
    reset = settings.reset
    if reset.control_time_s is not None:
        fps = float(env.metadata.get("render_fps") or DEFAULT_FPS)
        env = gymnasium.wrappers.TimeLimit(env, max(1, int(reset.control_time_s * fps)))
    if reset.fixed_seed is not None or reset.reset_time_s:
        env = FixedReset(env, reset)
    return env


class CropAndResize(Wrapper):
    """Crops the images of some cameras, and resizes those of all."""

    def __init__(self, env: Env, settings: ImagePreprocessing):
        super().__init__(env)
        self.crops, self.size = settings.crop_params_dict, settings.resize_size

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**options)
        cameras = _cameras(observation)
        if missing := [name for name in self.crops if name not in cameras]:
            raise ConfigError(
                f"env.processor.image_preprocessing.crop_params_dict names {missing[0]}, but the environment's cameras "
                f"are {', '.join(cameras) or 'none'}."
            )
        return self._changed(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, *rest = self.env.step(action)
        return (self._changed(observation), *rest)

    def _changed(self, observation: Any) -> Any:
        if not isinstance(observation, Mapping):
            image = np.asarray(observation)
            return self._image(image, IMAGE) if image.ndim == 3 else observation
        pixels = observation.get("pixels")
        if pixels is None:
            return observation
        if isinstance(pixels, Mapping):
            changed: Any = {name: self._image(image, IMAGES + name) for name, image in pixels.items()}
        else:
            changed = self._image(pixels, IMAGE)
        return {**observation, "pixels": changed}

    def _image(self, image: np.ndarray, name: str) -> np.ndarray:
        """[H, W, C]."""
        image = np.asarray(image)
        if image.shape[-1] not in (1, 3):
            image = image.transpose(1, 2, 0)
        if name in self.crops:
            top, left, height, width = self.crops[name]
            if not (top >= 0 and left >= 0 and top + height <= len(image) and left + width <= image.shape[1]):
                raise ConfigError(
                    f"env.processor.image_preprocessing.crop_params_dict.{name}={list(self.crops[name])} is not inside "
                    f"of the image, which has {len(image)} rows and {image.shape[1]} columns: give [top, left, height, "
                    "width]."
                )
            image = image[top : top + height, left : left + width]
        if self.size is None or image.shape[:2] == tuple(self.size):
            return np.ascontiguousarray(image)
        picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
        resized = np.asarray(picture.resize((self.size[1], self.size[0]), Image.Resampling.BILINEAR))
        return resized[..., None] if resized.ndim == 2 else resized


def _cameras(observation: Any) -> list[str]:
    if not isinstance(observation, Mapping):
        return [IMAGE] if np.ndim(observation) == 3 else []
    pixels = observation.get("pixels", {})
    return [IMAGES + name for name in pixels] if isinstance(pixels, Mapping) else [IMAGE]


class DeltaActions(Wrapper):
    """Actions are steps of the end effector from where it is; the environment gets where it is to go."""

    def __init__(self, env: Env, settings: EndEffectorSettings):
        super().__init__(env)
        space, sizes = env.action_space, settings.end_effector_step_sizes
        assert isinstance(space, gymnasium.spaces.Box)
        self.sizes = np.array([*sizes.values()], np.float32)
        self.count = len(sizes)
        rest = space.shape[0] - self.count
        if rest < 0 or not (self.sizes > 0).all():
            raise ConfigError(
                f"env.processor.inverse_kinematics.end_effector_step_sizes={sizes}: give a positive step for each "
                f"number of the position that the environment's {space.shape[0]} actions begin with."
            )
        names = ("gripper",) if rest == 1 else tuple(f"number {self.count + index}" for index in range(rest))
        self.action_names = (*(f"delta_{axis}" for axis in sizes), *names)
        self.low, self.high = self._bounds(space, settings.end_effector_bounds)
        ones = np.ones(self.count, np.float32)
        self.action_space = gymnasium.spaces.Box(
            np.concatenate([-ones, space.low[self.count :]]).astype(np.float32),
            np.concatenate([ones, space.high[self.count :]]).astype(np.float32),
        )
        self.position = np.zeros(self.count, np.float32)

    def _bounds(
        self, space: gymnasium.spaces.Box, bounds: Mapping[str, list[float]]
    ) -> tuple[np.ndarray, np.ndarray]:
        low, high = space.low[: self.count], space.high[: self.count]
        if not bounds:
            return low, high
        if {*bounds} != {"min", "max"} or any(len(bound) != self.count for bound in bounds.values()):
            raise ConfigError(
                f"env.processor.inverse_kinematics.end_effector_bounds={dict(bounds)}: give {{min: [...], max: [...]}} "
                f"with {self.count} numbers each."
            )
        return np.maximum(low, bounds["min"]), np.minimum(high, bounds["max"])

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**options)
        self.position = _state(observation)[: self.count]
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        action = np.asarray(action, np.float32)
        target = np.clip(self.position + action[: self.count] * self.sizes, self.low, self.high)
        result = self.env.step(np.concatenate([target, action[self.count :]]))
        self.position = _state(result[0])[: self.count]
        return result


class GripperPenalty(Wrapper):
    """A cost of each time that the gripper is opened or closed, as `info["discrete_penalty"]`."""

    def __init__(self, env: Env, settings: EnvProcessor):
        super().__init__(env)
        self.settings, self.largest = settings.gripper, settings.max_gripper_pos
        space = env.action_space
        if not isinstance(space, gymnasium.spaces.Box) or (space.low[-1], space.high[-1]) != (CLOSE, OPEN):
            raise ConfigError(
                "env.processor.gripper.gripper_penalty needs an environment whose last action is a gripper's choice "
                f"from 0 (close) to 2 (open), but its actions are {space}."
            )
        self.position = 0.0

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**options)
        self.position = self._position(observation)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        choice = round(float(np.asarray(action).reshape(-1)[-1]))
        opened = choice == OPEN and self.position > self.settings.closed_threshold
        closed = choice == CLOSE and self.position < self.settings.open_threshold
        penalty = self.settings.gripper_penalty if opened or closed else 0.0
        self.position = self._position(observation)
        return observation, reward, terminated, truncated, {**info, "discrete_penalty": penalty}

    def _position(self, observation: Any) -> float:
        """0: open, 1: closed."""
        return float(_state(observation)[self.settings.state_index]) / self.largest


class FixedReset(Wrapper):
    """Begins each episode alike, or after a pause."""

    def __init__(self, env: Env, settings: ResetSettings):
        super().__init__(env)
        self.settings = settings

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        if self.settings.reset_time_s:
            time.sleep(self.settings.reset_time_s)
        fixed = self.settings.fixed_seed
        return self.env.reset(seed=seed if fixed is None else fixed, options=options)


def _state(observation: Any) -> np.ndarray:
    """The robot's own numbers."""
    state = observation.get("agent_pos") if isinstance(observation, Mapping) else observation
    if state is None or np.ndim(state) != 1:
        raise ConfigError(
            "env.processor: steps of the end effector and penalties of the gripper need the robot's state "
            "(agent_pos) in the environment's observation."
        )
    return np.asarray(state, np.float32)
