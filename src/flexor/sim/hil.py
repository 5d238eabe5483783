"""gym_hil's simulated Franka arm: seeded fully, with limits of what it observes, and an expert that picks up the cube.

The expert helps a policy that learns: it reads the simulator's state.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np

PACKAGE = "gym_hil"
TASK = "PandaPickCube-v0"
NO_DELAY = {"reset_delay_seconds": 0.0}  # for people, between episodes
JOINT_SPEEDS = (2.175,) * 4 + (2.61,) * 3  # rad/s, the arm's largest
GRIPPER_CLOSED = 255.0  # of its command

STEP = 0.025  # metres that an action of 1 moves the arm
ABOVE = 0.08  # metres, over the cube that the expert approaches
NEAR, ALIGNED = 0.025, 0.012  # metres from the cube: it can be grasped; it can be grasped in its middle
FAR = 0.02  # metres beside the cube, from which the expert does not go down
CLOSE, STAY, OPEN = 2.0, 1.0, 0.0  # the gripper's choices, as this simulator takes them
FINGERS_AT_REST = 0.2  # rad/s


def arguments(env_id: str) -> dict[str, Any]:
    """What gym_hil's environments are made with by default; those without its wrappers take nothing."""
    return {} if "Base" in env_id or "Viewer" in env_id else dict(NO_DELAY)


def render_without_screen() -> None:
    """Have MuJoCo, which gym_hil always starts a renderer of, render without a screen where there is none."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")


class GymHIL(gymnasium.Wrapper[Any, Any, Any, Any]):
    """One of gym_hil's environments.

    They draw from NumPy's global generator, whatever seed they are given. Here each has a state of that generator of
    its own, so that an episode is a function of its seed, and nobody else's numbers change.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]):
        super().__init__(env)
        self.generator: Any = np.random.RandomState().get_state()
        self.observation_space = self._limited()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        if seed is not None:
            self.generator = np.random.RandomState(seed).get_state()
        with self._own_generator():
            return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        with self._own_generator():
            observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, {**info, "is_success": bool(info.get("succeed"))}

    def render(self) -> Any:
        """All its cameras, side by side."""
        return np.concatenate(self.unwrapped.render(), 1)  # type: ignore[arg-type]

    @contextmanager
    def _own_generator(self) -> Iterator[None]:
        outside = np.random.get_state()  # noqa: NPY002 (it is the global one that gym_hil draws from)
        np.random.set_state(self.generator)  # noqa: NPY002
        try:
            yield
        finally:
            self.generator = np.random.get_state()  # noqa: NPY002
            np.random.set_state(outside)  # noqa: NPY002

    def _limited(self) -> gymnasium.Space[Any]:
        """Its observations with the limits of the arm and of where it can reach. gym_hil says they have none."""
        simulator: Any = self.unwrapped
        joints = simulator.model.jnt_range[:7]
        speeds = np.array(JOINT_SPEEDS)
        low, high = simulator._cartesian_bounds
        spaces = dict(simulator.observation_space.spaces)
        spaces["agent_pos"] = _box([joints[:, 0], -speeds, [0.0], low], [joints[:, 1], speeds, [255.0], high])
        if "environment_state" in spaces:
            spaces["environment_state"] = _box([low], [high])
        return gymnasium.spaces.Dict(spaces)


def _box(low: list[Any], high: list[Any]) -> gymnasium.spaces.Box:
    return gymnasium.spaces.Box(np.concatenate(low).astype("f4"), np.concatenate(high).astype("f4"))


def picks_cube(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether the expert knows the task."""
    return type(env.unwrapped).__name__ == "PandaPickCubeGymEnv"


def expert_action(simulator: Any) -> np.ndarray:
    """What picks up the cube in this state: [dx, dy, dz] in steps, and the gripper's choice.

    Like that of the built-in task, the expert has no memory, so it can take over at any step.
    """
    data = simulator.data
    cube, hand = data.sensor("block_pos").data, data.sensor("2f85/pinch_pos").data
    target = data.mocap_pos[0].copy()  # where the arm is going
    beside, apart = np.linalg.norm(cube[:2] - hand[:2]), np.linalg.norm(cube - hand)
    closed = simulator.get_gripper_pose()[0] > GRIPPER_CLOSED / 2
    goal, choice = target.copy(), STAY
    if closed and apart < NEAR:
        if np.abs(data.qvel[7:9]).max() < FINGERS_AT_REST:
            goal[2] += STEP
    elif closed:
        goal[2], choice = ABOVE, OPEN
    elif beside > FAR:
        goal[:] = (*cube[:2], ABOVE)
    else:
        goal[:] = cube
        choice = CLOSE if apart < NEAR and beside < ALIGNED else STAY
    return np.array([*np.clip((goal - target) / STEP, -1, 1), choice], np.float32)
