"""The built-in task's expert: demonstrates the task, and how to recover from errors.

The expert has no memory: its action is a function of the table's state. So it is easy to imitate and can
recover from any state. The dataset records the expert's action, while the executed action may be disturbed
(as in DART, Laskey et al. 2017). So demonstrations visit the states that a policy's own small errors lead
to, together with the right action.
"""

from __future__ import annotations

import math

import numpy as np

from flexor.sim.task import Point, State

# Between these distances the fingers open or close gradually. A policy would have to hit a threshold
# exactly, and a policy that hovers just before it would never cross it.
GRASP_FROM, GRASP_AT = 0.32, 0.16  # gripper to block: open to closed
RELEASE_FROM, RELEASE_AT = 0.32, 0.16  # block to goal: closed to open

# Disturbances at `noise=1`.
JITTER = 0.10  # standard deviation of the displacement of the target
JITTER_MEMORY = 0.8  # share of one step's displacement in the next: drift rather than shaking
SLIP_CHANCE = 0.3  # probability of one finger error in an episode: closing early or dropping the block
SLIP_STEPS = 4
SLIP_LATEST = 35


def expert_action(state: State) -> np.ndarray:
    """The action for this state: [target x, target y, target opening] as float32."""
    if state.success:
        return _toward(state, state.gripper, state.gripper, opening=1.0)
    if state.grasped:
        return _toward(state, state.block, state.goal, -_ramp(state.carry, RELEASE_FROM, RELEASE_AT))
    # Fingers that closed on nothing must open again before they can close on the block.
    opening = _ramp(state.reach, GRASP_FROM, GRASP_AT) if state.opening > 0 else 1.0
    return _toward(state, state.gripper, state.block, opening)


def _ramp(distance: float, far: float, near: float) -> float:
    """1 from `far` on, -1 up to `near`, linear in between."""
    return min(max(2 * (distance - near) / (far - near) - 1, -1.0), 1.0)


def _toward(state: State, start: Point, end: Point, opening: float) -> np.ndarray:
    """The action whose target is the gripper's position plus the vector from `start` to `end`.

    The gripper limits its own speed. With a target that moves just ahead of the gripper, a policy could
    predict actions from the gripper's position alone, and would not learn where block and disc are.
    """
    x, y = state.gripper[0] + end[0] - start[0], state.gripper[1] + end[1] - start[1]
    return np.clip(np.array([x, y, opening], np.float32), -1, 1)


class Disturbance:
    """Disturbs the executed actions; deterministic for a given seed."""

    def __init__(self, seed: int, noise: float):
        # The constant separates this random stream from the one that places the objects.
        self._rng = np.random.default_rng([0xD157, seed])
        self._noise = noise
        self._drift = np.zeros(2)
        slips = self._rng.random() < SLIP_CHANCE * noise
        self._slip_from = int(self._rng.integers(3, SLIP_LATEST)) if slips else None
        self._step = 0

    def apply(self, action: np.ndarray) -> np.ndarray:
        """The action to execute instead of this one."""
        if self._noise == 0:
            return action
        fresh = self._rng.normal(size=2) * math.sqrt(1 - JITTER_MEMORY**2)
        self._drift = JITTER_MEMORY * self._drift + fresh
        x, y = action[:2] + self._noise * JITTER * self._drift
        opening = action[2]
        if self._slip_from is not None and 0 <= self._step - self._slip_from < SLIP_STEPS:
            opening = -opening
        self._step += 1
        return np.clip(np.array([x, y, opening], np.float32), -1, 1)
