"""The built-in task's expert: shows how it is done, and how to recover when it went wrong.

The expert has no memory: its action is a function of the table's state. That makes it easy to imitate
and lets it recover from anything. What it would do is what gets recorded, while what is carried out
may be disturbed (as in DART, Laskey et al. 2017), so that demonstrations pass through the states a
policy's own small errors lead to, with the right action written next to them.
"""

from __future__ import annotations

import math

import numpy as np

from flexor.sim.task import Point, State

# Between these distances the fingers go from one end to the other, gradually: a threshold would be a
# step that a policy has to hit exactly, and that one which hovers just short of it never takes.
GRASP_FROM, GRASP_AT = 0.32, 0.16  # gripper to block: open to closed
RELEASE_FROM, RELEASE_AT = 0.32, 0.16  # block to goal: closed to open

# Disturbances at `noise=1`.
JITTER = 0.10  # standard deviation of the displacement of the target
JITTER_MEMORY = 0.8  # of one step's displacement in the next: drift rather than shaking
SLIP_CHANCE = 0.3  # of an episode with one fumble of the fingers: closing early or dropping the block
SLIP_STEPS = 4
SLIP_LATEST = 35


def expert_action(state: State) -> np.ndarray:
    """What to do now: [wanted x, wanted y, wanted opening] as float32."""
    if state.success:
        return _toward(state, state.gripper, state.gripper, opening=1.0)
    if state.held:
        return _toward(state, state.block, state.goal, -_ramp(state.carry, RELEASE_FROM, RELEASE_AT))
    # Fingers that closed on nothing must open again before they can close on the block.
    opening = _ramp(state.reach, GRASP_FROM, GRASP_AT) if state.opening > 0 else 1.0
    return _toward(state, state.gripper, state.block, opening)


def _ramp(distance: float, far: float, there: float) -> float:
    """1 when far, -1 when there, and in between in proportion."""
    return min(max(2 * (distance - there) / (far - there) - 1, -1.0), 1.0)


def _toward(state: State, start: Point, end: Point, opening: float) -> np.ndarray:
    """Ask the gripper to go at once to where it brings what is at `start` to `end`.

    Speed is the gripper's own concern. A target that creeps ahead of the gripper would hide what the
    policy must learn, where the block and the disc are, behind what it is told, where the gripper is.
    """
    x, y = state.gripper[0] + end[0] - start[0], state.gripper[1] + end[1] - start[1]
    return np.clip(np.array([x, y, opening], np.float32), -1, 1)


class Disturbance:
    """Pushes what is carried out away from what the expert wanted; the same way for the same seed."""

    def __init__(self, seed: int, noise: float):
        # The constant keeps this stream apart from the one that places the objects.
        self._rng = np.random.default_rng([0xD157, seed])
        self._noise = noise
        self._drift = np.zeros(2)
        slips = self._rng.random() < SLIP_CHANCE * noise
        self._slip_from = int(self._rng.integers(3, SLIP_LATEST)) if slips else None
        self._step = 0

    def apply(self, action: np.ndarray) -> np.ndarray:
        """The action to carry out in place of this one."""
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
