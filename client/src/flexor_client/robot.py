"""Drives a robot of LeRobot's: its observations go to a player, the player's actions to the robot.

LeRobot itself is not needed here: whatever has the methods of its `Robot` will do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional, Protocol

import numpy as np

from flexor_client.errors import ClientError
from flexor_client.limits import check_actions

log = logging.getLogger("flexor_client")

STATE, IMAGES = "observation.state", "observation.images."

OnStep = Callable[[Mapping[str, Any], Optional[np.ndarray]], None]


class RobotLike(Protocol):
    """The part of LeRobot's `Robot` that is used."""

    @property
    def observation_features(self) -> Mapping[str, Any]: ...

    @property
    def action_features(self) -> Mapping[str, Any]: ...

    def get_observation(self) -> Mapping[str, Any]: ...

    def send_action(self, action: dict[str, Any]) -> Mapping[str, Any]: ...


class PlayerLike(Protocol):
    """RealTimePlayer or ChunkPlayer."""

    def reset(self, episode: int = 0, position: np.ndarray | None = None) -> None: ...

    def act(self, observation: Mapping[str, Any], task: str = "") -> np.ndarray | None: ...


class RobotNames:
    """A robot's names and the policy's, as in LeRobot's datasets.

    The robot's numbers, in its order, are `observation.state`; camera NAME is `observation.images.NAME`. `rename` maps
    a camera's or a number's name to another name for the policy. The action's parts are in the robot's order, or in
    that of `action_names`, those that the policy was trained with.
    """

    def __init__(
        self,
        robot: RobotLike,
        rename: Mapping[str, str] | None = None,
        action_names: Sequence[str] | None = None,
    ):
        features, rename = robot.observation_features, dict(rename or {})
        unknown = sorted(rename.keys() - features.keys())
        if unknown:
            raise ClientError(f"rename: the robot has no {', '.join(unknown)}; it has {', '.join(features)}.")
        cameras = [name for name, form in features.items() if isinstance(form, tuple)]
        self.cameras = {name: rename.get(name, IMAGES + name) for name in cameras}
        numbers = [name for name in features if name not in self.cameras]
        self.numbers = [name for name in numbers if name not in rename]
        self.renamed_numbers = {name: rename[name] for name in numbers if name in rename}
        self.actions = list(robot.action_features)
        if action_names is not None:
            if sorted(action_names) != sorted(self.actions):
                raise ClientError(
                    f"The policy was trained for actions {list(action_names)}, but the robot has {self.actions}. Is it "
                    "the right robot? If only the names differ, leave out action_names."
                )
            self.actions = list(action_names)

    def observation(self, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The robot's observation under the policy's names."""
        observation = {self.cameras[name]: np.asarray(values[name]) for name in self.cameras}
        if self.numbers:
            observation[STATE] = np.array([values[name] for name in self.numbers], np.float32)
        for name, policy_name in self.renamed_numbers.items():
            observation[policy_name] = np.atleast_1d(np.asarray(values[name], np.float32))
        return observation

    def action(self, action: np.ndarray) -> dict[str, float]:
        """An action [A] under the robot's names."""
        if len(action) != len(self.actions):
            raise ClientError(
                f"The policy's action has {len(action)} parts, but the robot needs {len(self.actions)}: "
                f"{', '.join(self.actions)}."
            )
        check_actions(np.asarray(action, np.float64), 1)  # whatever player it comes from
        return {name: float(value) for name, value in zip(self.actions, action)}

    def position(self, values: Mapping[str, Any]) -> np.ndarray | None:
        """The action that keeps the robot where it is; None if its actions are not among its observations."""
        if not all(name in values for name in self.actions):
            return None
        return np.array([values[name] for name in self.actions], np.float32)


@dataclass
class DriveReport:
    """What happened in one episode."""

    steps: int = 0
    """Steps of the robot."""
    idle_steps: int = 0
    """Of these, without an action."""
    late: int = 0
    """Of these, longer than 1 / fps: the cameras, this computer or (with ChunkPlayer) the server are too slow."""


# their names until 0.1
setattr(DriveReport, "held", property(lambda report: report.idle_steps))  # noqa: B010
setattr(RobotNames, "alone", property(lambda names: names.renamed_numbers))  # noqa: B010


def drive(
    robot: RobotLike,
    player: PlayerLike,
    *,
    fps: float,
    task: str = "",
    steps: int | None = None,
    episode: int = 0,
    rename: Mapping[str, str] | None = None,
    action_names: Sequence[str] | None = None,
    when_held: Callable[[Mapping[str, Any]], dict[str, Any] | None] | None = None,
    on_step: OnStep | None = None,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> DriveReport:
    """One episode: `steps` steps at `fps` per second, or until `stop()`.

    The robot must be connected. `rename` and `action_names`: see RobotNames. If there is no action, nothing is sent to
    the robot, or what `when_held(observation)` returns. `on_step(observation, action)` gets what the robot saw, under
    the policy's names, and what it did: the action that `send_action` returned, or None. Errors, such as LimitError and
    ServerLostError, end the episode; nothing is sent to the robot after one.
    """
    if not fps > 0:
        raise ClientError(f"fps={fps}: give the steps of the robot per second.")
    names = RobotNames(robot, rename, action_names)
    report = DriveReport()
    player.reset(episode, names.position(robot.get_observation()))
    due = clock()
    while (steps is None or report.steps < steps) and not stop():
        values = robot.get_observation()
        observation = names.observation(values)
        action = player.act(observation, task)
        if action is None:
            report.idle_steps += 1
            command = when_held(values) if when_held is not None else None
        else:
            command = names.action(action)
        sent = robot.send_action(command) if command is not None else None
        if on_step is not None:
            on_step(observation, _executed(names, sent, action))
        report.steps += 1
        due += _pause(due, 1 / fps, report, clock, sleep)
    return report


def _pause(
    began: float,
    period: float,
    report: DriveReport,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> float:
    """Wait for the next step; returns how long after this one it begins.

    A step that took too long is not made up for: two actions at once would drive the robot too fast.
    """
    took = clock() - began
    if took >= period - 1e-9:
        report.late += 1
        sleep(period)
        return took + period
    sleep(period - took)
    return period


def _executed(
    names: RobotNames, sent: Mapping[str, Any] | None, action: np.ndarray | None
) -> np.ndarray | None:
    if sent is None or not all(name in sent for name in names.actions):
        return action
    return np.array([sent[name] for name in names.actions], np.float32)
