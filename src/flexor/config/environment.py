"""The settings `--env.*`: the environment, and the steps between it and the policy, under LeRobot's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flexor.core.typed import setting


@dataclass(frozen=True)
class ImagePreprocessing:
    crop_params_dict: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    """The part of a camera's image that is kept: {observation.images.front: [top, left, height, width]}."""
    resize_size: tuple[int, int] | None = setting(None, at_least=1)
    """Height and width that the images of all cameras are resized to, after cropping."""


@dataclass(frozen=True)
class GripperSettings:
    gripper_penalty: float = 0.0
    """Added to the reward of the gripper's critic when it opens a closed gripper or closes an open one, such as
    -0.02."""
    state_index: int = -1
    """Which number of observation.state is the gripper's position; -1: the last. gym_hil knows it itself."""
    open_threshold: float = 0.1
    """The gripper is open below this share of max_gripper_pos."""
    closed_threshold: float = 0.9
    """The gripper is closed above this share of max_gripper_pos."""


@dataclass(frozen=True)
class ResetSettings:
    control_time_s: float | None = setting(None, more_than=0)
    """Longest episode in seconds, at the environment's steps per second; default: its own limit, or env.max_steps."""
    reset_time_s: float = setting(0.0, at_least=0)
    """Seconds to wait before each episode, for a person who puts things back."""
    fixed_seed: int | None = setting(None, at_least=0)
    """Begin every episode with this seed, which is the same start; default: each with its own."""


@dataclass(frozen=True)
class EndEffectorSettings:
    end_effector_step_sizes: dict[str, float] = field(default_factory=dict)
    """Actions are steps of the end effector: {x: 0.02, y: 0.02, z: 0.02} are the distances that an action of 1 adds
    to its position, and the environment gets the sum. Both its actions and its state must begin with that position."""
    end_effector_bounds: dict[str, list[float]] = field(default_factory=dict)
    """Where the end effector may be: {min: [x, y, z], max: [x, y, z]}; default: the limits of the environment's
    actions."""


@dataclass(frozen=True)
class EnvProcessor:
    """Steps between the environment and the policy, the same in training and in evaluations."""

    image_preprocessing: ImagePreprocessing = field(default_factory=ImagePreprocessing)
    gripper: GripperSettings = field(default_factory=GripperSettings)
    reset: ResetSettings = field(default_factory=ResetSettings)
    inverse_kinematics: EndEffectorSettings = field(default_factory=EndEffectorSettings)
    max_gripper_pos: float = setting(100.0, more_than=0)
    """Position of the gripper when it is closed, in the units of observation.state."""


@dataclass(frozen=True)
class EnvConfig:
    type: str | None = None
    """Environment to evaluate in: place (the built-in task), pusht, gym_hil, or any gymnasium id."""
    task: str | None = None
    """Name of the environment, if the package has several, such as AlohaInsertion-v0."""
    package: str | None = None
    """Package to import so that the environment is registered, such as gym_pusht."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments passed to the environment, such as {obs_type: pixels_agent_pos}."""
    max_steps: int | None = setting(None, at_least=1)
    """Maximum steps per episode; default: the environment's own limit."""
    processor: EnvProcessor = field(default_factory=EnvProcessor)
