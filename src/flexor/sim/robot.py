"""The built-in task as a robot in real time: it moves on whether or not an action has arrived.

A gymnasium environment waits for its next action; a robot does not. Here time is simulated: who waits for something
lets it pass with `sleep`, and with every control period that passes the table makes one step. It has the methods of
LeRobot's `Robot`, so `flexor_client.drive` drives it like a real one.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from flexor.sim.task import FPS, TIME_LIMIT, PlaceEnv, Point

JOINTS = ("x", "y", "opening")


class PlaceRobot:
    """`idle`: what it does in a period for which it got no action. "stop": it stays where it is, as robots do whose
        commands are small steps. "last": it keeps moving to its last target, which in this task is far away.
    `block_speed`: how far the block slides in one period until it is grasped, in a direction of its own. At the
    edge of the table it falls off, and the episode is over. The gripper's largest step is 0.08. `wall_clock`: time is
    not simulated but real, to try things without a robot; when an episode is over, another one begins."""

    name = "flexor_place"

    def __init__(
        self,
        image_size: int = 32,
        obs_type: str = "pixels_agent_pos",
        idle: Literal["stop", "last"] = "stop",
        block_speed: float = 0.0,
        fps: float = FPS,
        wall_clock: bool = False,
    ):
        self.env = PlaceEnv(image_size, obs_type)
        self.idle, self.block_speed, self.fps = idle, block_speed, fps
        self.wall_clock = wall_clock
        self.reset(0)

    def reset(self, seed: int) -> None:
        self.seed, self._began = seed, time.monotonic()
        self._observation, _ = self.env.reset(seed=seed)
        self.now, self.steps, self.moved = 0.0, 0, 0
        self.success, self.fell_off = False, False
        angle = np.random.default_rng([0xB317, seed]).uniform(0, 2 * math.pi)
        self._slide: Point = (self.block_speed * math.cos(angle), self.block_speed * math.sin(angle))
        self._command: np.ndarray | None = None
        self._last: np.ndarray | None = None

    # --- what LeRobot's robots have

    @property
    def observation_features(self) -> dict[str, Any]:
        size = self.env.image_size
        if self.env.obs_type == "pixels_agent_pos":
            return {**dict.fromkeys(JOINTS, float), "image": (size, size, 3)}
        places = self._observation["environment_state"].shape
        return {**dict.fromkeys(JOINTS, float), "places": places}

    @property
    def action_features(self) -> dict[str, type]:
        return dict.fromkeys(JOINTS, float)

    @property
    def is_connected(self) -> bool:
        return True

    def connect(self, calibrate: bool = True) -> None:
        self.reset(self.seed)

    def disconnect(self) -> None: ...

    def get_observation(self) -> dict[str, Any]:
        if self.wall_clock:
            self.sleep(time.monotonic() - self._began - self.now)
            if self.done:
                self.reset(self.seed + 1)
        state = dict(zip(JOINTS, map(float, self._observation["agent_pos"]), strict=True))
        if "pixels" in self._observation:
            return {**state, "image": self._observation["pixels"]}
        return {**state, "places": self._observation["environment_state"]}

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        """The target for the control period that has just begun."""
        self._command = np.array([action[name] for name in JOINTS], np.float32)
        return action

    # --- simulated time

    def clock(self) -> float:
        """Seconds since the start of the episode."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass; the table moves on."""
        until = self.now + max(seconds, 0.0)
        period = 1 / self.fps
        while not self.done and (self.steps + 1) * period <= until + 1e-9:
            self._step()
            self.now = self.steps * period
        self.now = max(self.now, until)

    @property
    def done(self) -> bool:
        return self.success or self.fell_off or self.steps >= TIME_LIMIT

    def _step(self) -> None:
        action, self._command = self._command, None
        if action is None:
            stay = self._observation["agent_pos"]
            action = self._last if self.idle == "last" and self._last is not None else stay
        else:
            self._last = action
        if self.block_speed and not self.env.state.grasped:
            self._slide_block()
        before = self._observation["agent_pos"]
        self._observation, _, self.success, _, _ = self.env.step(action)
        self.steps += 1
        self.moved += bool(np.abs(self._observation["agent_pos"] - before).max() > 1e-3)

    def _slide_block(self) -> None:
        (x, y), (dx, dy) = self.env.state.block, self._slide
        self.env.state = replace(self.env.state, block=(x + dx, y + dy))
        self.fell_off = max(abs(x + dx), abs(y + dy)) > 1

    @property
    def task(self) -> str:
        return self.env.task_description
