"""The built-in task: with a gripper on a table, put the block on the disc.

It exists so that a first training run needs no download, no simulator and no GPU, and so that tests
can measure success in closed loop. The physics is exact and has no randomness after `reset`. Where
the block and the disc lie is only visible in the picture, so a policy that does not look fails.

Units: the table is [-1, 1] x [-1, 1]. The gripper's opening is 1 when open, -1 when its fingers
touch, and 0 is the width of the block. An action is the wanted gripper x, y and opening, in the
units of `agent_pos`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from flexor.core.errors import ConfigError, FlexorError
from flexor.sim.drawing import Painter

ENV_ID = "flexor/Place-v0"
TASK = "Put the red block on the green disc."
FPS = 10
TIME_LIMIT = 80
VIDEO_SIZE = 384

# What the gripper can do in one step.
SPEED = 0.08  # farthest it moves
GAIN = 0.5  # share of the way to the target it covers when near, so that it slows down and stops
FINGER_SPEED = 0.2

BLOCK_HALF = 0.2
GRASP_RADIUS = 0.24  # 12 % of the table's width: how far off the fingers may close and still hold
GOAL_RADIUS = 0.36
GOAL_TOLERANCE = 0.24  # likewise: the block's centre from the disc's
RELEASE_OPENING = 0.3  # a held block comes free above this, so a trembling command does not drop it

SPAWN = 0.68  # block and disc lie within this
GRIPPER_SPAWN = 0.8
FAR_APART = 0.6  # block to disc and block to gripper at the start, so that no episode starts solved
FARTHEST = 2 * math.sqrt(2)

Point = tuple[float, float]


@dataclass(frozen=True)
class State:
    """Everything there is to know about the table at one instant."""

    gripper: Point
    opening: float
    block: Point
    goal: Point
    held: bool = False

    @property
    def reach(self) -> float:
        """From the gripper to the block."""
        return math.dist(self.gripper, self.block)

    @property
    def carry(self) -> float:
        """From the block to the goal."""
        return math.dist(self.block, self.goal)

    @property
    def success(self) -> bool:
        """The block lies on the disc and the gripper has let go of it."""
        return not self.held and self.carry <= GOAL_TOLERANCE

    @property
    def reward(self) -> float:
        """How far along the task is, in [0, 1]: up to 0.4 before the grasp, 0.5 to 0.9 after it, 1 when done.

        A level, not a difference: read it as the value of being here, as PushT's reward is. Since a
        success ends the episode, compare episodes by success and best reward, not by the sum.
        """
        if self.success:
            return 1.0
        if self.held:
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
    """The state one step later. `action` is [wanted x, wanted y, wanted opening], each in [-1, 1]."""
    wanted_x, wanted_y, wanted_opening = (_clip(float(value)) for value in action)
    gripper = _move(state.gripper, (wanted_x, wanted_y))
    opening = state.opening + _clip(wanted_opening - state.opening, -FINGER_SPEED, FINGER_SPEED)

    if state.held:
        # The block goes where the gripper goes, and keeps the fingers from closing further.
        dx, dy = gripper[0] - state.gripper[0], gripper[1] - state.gripper[1]
        block = _clip(state.block[0] + dx), _clip(state.block[1] + dy)
        return State(gripper, max(opening, 0.0), block, state.goal, held=opening <= RELEASE_OPENING)

    closes_on_block = state.opening > 0 >= opening and math.dist(gripper, state.block) <= GRASP_RADIUS
    if closes_on_block:
        # The fingers close along x and so push the block into the middle between them.
        return State(gripper, 0.0, (gripper[0], state.block[1]), state.goal, held=True)
    return State(gripper, opening, state.block, state.goal, held=False)


def sample_start(rng: np.random.Generator) -> State:
    """A start with gripper, block and disc anywhere, the block away from both."""
    while True:
        block = rng.uniform(-SPAWN, SPAWN, 2).tolist()
        goal = rng.uniform(-SPAWN, SPAWN, 2).tolist()
        gripper = rng.uniform(-GRIPPER_SPAWN, GRIPPER_SPAWN, 2).tolist()
        if math.dist(block, goal) >= FAR_APART and math.dist(block, gripper) >= FAR_APART:
            return State((gripper[0], gripper[1]), 1.0, (block[0], block[1]), (goal[0], goal[1]))


class PlaceEnv(gymnasium.Env[Any, np.ndarray]):
    """The task as a gymnasium environment with the observations of LeRobot's: `pixels` and `agent_pos`."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": FPS}  # noqa: RUF012
    task_description = TASK

    def __init__(
        self,
        image_size: int = 32,
        obs_type: str = "pixels_agent_pos",
        render_mode: str | None = None,
    ):
        if obs_type not in ("pixels_agent_pos", "environment_state_agent_pos"):
            raise ConfigError(
                f"{ENV_ID}: obs_type is {obs_type!r}; use 'pixels_agent_pos' or 'environment_state_agent_pos'"
            )
        if image_size < 16:
            raise ConfigError(f"{ENV_ID}: image_size is {image_size}; use 16 or more (32 is the default)")
        self.image_size = image_size
        self.obs_type = obs_type
        self.render_mode = render_mode
        self.state = State((0.0, 0.0), 1.0, (0.0, 0.0), (0.0, 0.0))
        self._eye = Painter(image_size, BLOCK_HALF, GOAL_RADIUS)
        self._camera: Painter | None = None  # the large picture, made when first asked for

        box = gymnasium.spaces.Box
        spaces: dict[str, gymnasium.Space[Any]] = {"agent_pos": box(-1, 1, (3,), np.float32)}
        if obs_type == "pixels_agent_pos":
            spaces["pixels"] = box(0, 255, (image_size, image_size, 3), np.uint8)
        else:
            spaces["environment_state"] = box(-1, 1, (4,), np.float32)
        self.observation_space = gymnasium.spaces.Dict(spaces)
        self.action_space = box(-1, 1, (3,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self.state = sample_start(self.np_random)
        return self._observe(), {"is_success": False}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        action = np.asarray(action, np.float64)
        if action.shape != (3,) or not np.isfinite(action).all():
            raise FlexorError(
                f"{ENV_ID}: an action must be 3 finite numbers (x, y, opening), got {action.tolist()}; "
                "if a policy made it, its weights or its normalisation statistics are broken"
            )
        self.state = advance(self.state, action)
        success = self.state.success
        return self._observe(), self.state.reward, success, False, {"is_success": success}

    def _observe(self) -> dict[str, np.ndarray]:
        state = self.state
        observation = {"agent_pos": np.array([*state.gripper, state.opening], np.float32)}
        if self.obs_type == "pixels_agent_pos":
            observation["pixels"] = self._draw(self._eye)
        else:
            observation["environment_state"] = np.array([*state.block, *state.goal], np.float32)
        return observation

    def _draw(self, painter: Painter) -> np.ndarray:
        s = self.state
        return painter.draw(s.gripper, s.opening, s.block, s.goal, s.held, s.success)

    def render(self) -> np.ndarray | None:
        """The scene as the policy sees it, in a size for people."""
        if self.render_mode is None:
            return None
        if self._camera is None:
            self._camera = Painter(VIDEO_SIZE, BLOCK_HALF, GOAL_RADIUS)
        return self._draw(self._camera)
