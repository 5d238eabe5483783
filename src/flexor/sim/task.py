"""The built-in task: with a gripper on a table, put the block on the disc.

With two targets there is a green and a blue disc, and only the task description says which one is meant.

With it, a first training run needs no download, no simulator and no GPU, and tests can measure success in
closed loop. The physics is exact and has no randomness after `reset`. The positions of block and disc are
only visible in the image, so a policy that ignores the image fails.

Units: the table is [-1, 1] x [-1, 1]. The gripper's opening is 1 when open, -1 when its fingers
touch, and 0 at the width of the block. An action is the target x, y and opening of the gripper, in the
units of `agent_pos`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np

from flexor.core.errors import ConfigError, FlexorError
from flexor.sim.drawing import Painter

ENV_ID = "flexor/Place-v0"
COLOURS = ("green", "blue")  # of the discs
FPS = 10
TIME_LIMIT = 80
VIDEO_SIZE = 384

# Limits of the gripper in one step.
SPEED = 0.08  # largest distance
GAIN = 0.5  # share of the remaining distance it covers near the target, so that it slows down and stops
FINGER_SPEED = 0.2

BLOCK_HALF = 0.2
GRASP_RADIUS = 0.24  # 12 % of the table's width: largest distance at which closing fingers grasp the block
GOAL_RADIUS = 0.36
GOAL_TOLERANCE = 0.24  # likewise: the block's centre from the disc's
RELEASE_OPENING = 0.3  # a held block is released above this, so a noisy command does not drop it

WRIST_ZOOM = 2.0  # of the camera at the gripper

SPAWN = 0.68  # block and disc lie within this
GRIPPER_SPAWN = 0.8
FAR_APART = 0.6  # block to disc and block to gripper at the start, so that no episode starts solved
DISCS_APART = 2 * GOAL_RADIUS + 0.05  # so that they do not touch
FARTHEST = 2 * math.sqrt(2)

Point = tuple[float, float]


@dataclass(frozen=True)
class State:
    """The complete state of the table at one instant."""

    gripper: Point
    opening: float
    block: Point
    goal: Point
    grasped: bool = False
    goal_colour: int = 0
    """Index in COLOURS."""
    other_disc: Point | None = None
    """The disc of the other colour, which the task is not about; None with one target."""

    @property
    def discs(self) -> list[tuple[Point, int]]:
        """Position and colour of each disc, in the order of colours, which does not tell the goal."""
        discs = [(self.goal, self.goal_colour)]
        if self.other_disc is not None:
            discs.append((self.other_disc, 1 - self.goal_colour))
        return sorted(discs, key=lambda disc: disc[1])

    @property
    def reach(self) -> float:
        """Distance from the gripper to the block."""
        return math.dist(self.gripper, self.block)

    @property
    def carry(self) -> float:
        """Distance from the block to the goal."""
        return math.dist(self.block, self.goal)

    @property
    def success(self) -> bool:
        """Whether the block is on the disc and the gripper has released it."""
        return not self.grasped and self.carry <= GOAL_TOLERANCE

    @property
    def reward(self) -> float:
        """Progress of the task, in [0, 1]: up to 0.4 before the grasp, 0.5 to 0.9 after it, 1 when done.

        It is the value of the current state, not a difference, like PushT's reward. Since success ends the
        episode, compare episodes by success and best reward, not by the sum.
        """
        if self.success:
            return 1.0
        if self.grasped:
            return 0.5 + 0.4 * (1 - self.carry / FARTHEST)
        return 0.4 * (1 - self.reach / FARTHEST)


def _clip(value: float, low: float = -1.0, high: float = 1.0) -> float:
    return min(max(value, low), high)


def _move(position: Point, target: Point) -> Point:
    """One step toward the target, no farther than SPEED and never off the table."""
    dx, dy = GAIN * (target[0] - position[0]), GAIN * (target[1] - position[1])
    length = math.sqrt(dx * dx + dy * dy)
    scale = min(1.0, SPEED / length) if length > 0 else 0.0
    return _clip(position[0] + scale * dx), _clip(position[1] + scale * dy)


def advance(state: State, action: np.ndarray) -> State:
    """The state one step later. `action` is [target x, target y, target opening], each in [-1, 1]."""
    target_x, target_y, target_opening = (_clip(float(value)) for value in action)
    gripper = _move(state.gripper, (target_x, target_y))
    opening = state.opening + _clip(target_opening - state.opening, -FINGER_SPEED, FINGER_SPEED)

    if state.grasped:
        # The block moves with the gripper, and keeps the fingers from closing further.
        dx, dy = gripper[0] - state.gripper[0], gripper[1] - state.gripper[1]
        block = _clip(state.block[0] + dx), _clip(state.block[1] + dy)
        grasped = opening <= RELEASE_OPENING
        return replace(state, gripper=gripper, opening=max(opening, 0.0), block=block, grasped=grasped)

    closes_on_block = state.opening > 0 >= opening and math.dist(gripper, state.block) <= GRASP_RADIUS
    if closes_on_block:
        # The fingers close along x, so they push the block to the middle between them.
        return replace(state, gripper=gripper, opening=0.0, block=(gripper[0], state.block[1]), grasped=True)
    return replace(state, gripper=gripper, opening=opening, grasped=False)


def describe(colour: int) -> str:
    """The task in words."""
    return f"Put the red block on the {COLOURS[colour]} disc."


def sample_start(rng: np.random.Generator, targets: int = 1) -> State:
    """A random start state; the block is far from gripper and discs."""
    start = _sample_scene(rng)
    if targets == 1:
        return start
    while True:
        x, y = rng.uniform(-SPAWN, SPAWN, 2).tolist()
        if math.dist((x, y), start.goal) >= DISCS_APART and math.dist((x, y), start.block) >= FAR_APART:
            return replace(start, goal_colour=int(rng.integers(2)), other_disc=(x, y))
        start = _sample_scene(rng)  # it may leave no place for another disc


def _sample_scene(rng: np.random.Generator) -> State:
    while True:
        block = rng.uniform(-SPAWN, SPAWN, 2).tolist()
        goal = rng.uniform(-SPAWN, SPAWN, 2).tolist()
        gripper = rng.uniform(-GRIPPER_SPAWN, GRIPPER_SPAWN, 2).tolist()
        if math.dist(block, goal) >= FAR_APART and math.dist(block, gripper) >= FAR_APART:
            return State((gripper[0], gripper[1]), 1.0, (block[0], block[1]), (goal[0], goal[1]))


class PlaceEnv(gymnasium.Env[Any, np.ndarray]):
    """The task as a gymnasium environment with LeRobot's observations: `pixels` and `agent_pos`."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": FPS}  # noqa: RUF012

    def __init__(
        self,
        image_size: int = 32,
        obs_type: str = "pixels_agent_pos",
        render_mode: str | None = None,
        targets: int = 1,
        wrong_words: bool = False,
        reward: str = "progress",
        cameras: int = 1,
    ):
        """`targets`: discs on the table, 1 or 2. `wrong_words`: the description names the other disc, which shows
        whether a policy listens. `reward`: progress, or 1 at success and 0 before (sparse). `cameras`: 1 above the
        table, or another one at the gripper (2), which sees half as far."""
        if obs_type not in ("pixels_agent_pos", "environment_state_agent_pos"):
            raise ConfigError(
                f"{ENV_ID}: obs_type={obs_type!r} is unknown; use 'pixels_agent_pos' or 'environment_state_agent_pos'"
            )
        if image_size < 16:
            raise ConfigError(f"{ENV_ID}: image_size={image_size} is too small; use 16 or more (default 32)")
        if targets not in (1, 2) or (wrong_words and targets == 1):
            raise ConfigError(
                f"{ENV_ID}: targets={targets}, wrong_words={wrong_words}: use 1 or 2 targets; wrong words need 2"
            )
        if cameras not in (1, 2):
            raise ConfigError(f"{ENV_ID}: cameras={cameras}: use 1 or 2")
        if reward not in ("progress", "sparse"):
            raise ConfigError(f"{ENV_ID}: reward={reward!r} is unknown; use 'progress' or 'sparse'")
        self.sparse = reward == "sparse"
        self.image_size = image_size
        self.obs_type = obs_type
        self.targets = targets
        self.wrong_words = wrong_words
        self.render_mode = render_mode
        self.state = State((0.0, 0.0), 1.0, (0.0, 0.0), (0.0, 0.0))
        self._eye = Painter(image_size, BLOCK_HALF, GOAL_RADIUS)
        self._wrist = Painter(image_size, WRIST_ZOOM * BLOCK_HALF, WRIST_ZOOM * GOAL_RADIUS)
        self.cameras = cameras
        self._camera: Painter | None = None  # the large image, created at first use

        box = gymnasium.spaces.Box
        spaces: dict[str, gymnasium.Space[Any]] = {"agent_pos": box(-1, 1, (3,), np.float32)}
        if obs_type == "pixels_agent_pos":
            image = box(0, 255, (image_size, image_size, 3), np.uint8)
            two = gymnasium.spaces.Dict({"top": image, "wrist": image})
            spaces["pixels"] = image if cameras == 1 else two
        else:
            spaces["environment_state"] = box(-1, 1, (2 + 2 * targets,), np.float32)
        self.observation_space = gymnasium.spaces.Dict(spaces)
        self.action_space = box(-1, 1, (3,), np.float32)

    @property
    def task_description(self) -> str:
        """The task of the current episode."""
        colour = self.state.goal_colour
        return describe(1 - colour if self.wrong_words else colour)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self.state = sample_start(self.np_random, self.targets)
        return self._observe(), {"is_success": False}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        action = np.asarray(action, np.float64)
        if action.shape != (3,) or not np.isfinite(action).all():
            raise FlexorError(
                f"{ENV_ID}: an action must be 3 finite numbers (x, y, opening), got {action.tolist()}; "
                "if it comes from a policy, its weights or its normalisation statistics are broken"
            )
        self.state = advance(self.state, action)
        success = self.state.success
        reward = float(success) if self.sparse else self.state.reward
        return self._observe(), reward, success, False, {"is_success": success}

    def _observe(self) -> dict[str, Any]:
        state = self.state
        observation: dict[str, Any] = {"agent_pos": np.array([*state.gripper, state.opening], np.float32)}
        if self.obs_type == "pixels_agent_pos":
            above = self._draw(self._eye)
            observation["pixels"] = (
                above if self.cameras == 1 else {"top": above, "wrist": self._draw_wrist()}
            )
        else:
            places = [value for place, _ in state.discs for value in place]
            observation["environment_state"] = np.array([*state.block, *places], np.float32)
        return observation

    def _draw(self, painter: Painter) -> np.ndarray:
        s = self.state
        return painter.draw(s.gripper, s.opening, s.block, s.discs, s.grasped, s.goal if s.success else None)

    def _draw_wrist(self) -> np.ndarray:
        """The scene around the gripper."""
        s = self.state

        def seen_from_gripper(place: Point) -> Point:
            return WRIST_ZOOM * (place[0] - s.gripper[0]), WRIST_ZOOM * (place[1] - s.gripper[1])

        discs = [(seen_from_gripper(place), colour) for place, colour in s.discs]
        done = seen_from_gripper(s.goal) if s.success else None
        return self._wrist.draw((0.0, 0.0), s.opening, seen_from_gripper(s.block), discs, s.grasped, done)

    def render(self) -> np.ndarray | None:
        """The scene as the policy sees it, in a larger size for people."""
        if self.render_mode is None:
            return None
        if self._camera is None:
            self._camera = Painter(VIDEO_SIZE, BLOCK_HALF, GOAL_RADIUS)
        return self._draw(self._camera)
