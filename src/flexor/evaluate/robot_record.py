"""Records what a robot of LeRobot's saw and did while a served policy controlled it."""

from __future__ import annotations

import importlib
import runpy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flexor.core.console import Progress
from flexor.core.errors import ConfigError, FlexorError
from flexor.data.format.writer import DatasetWriter
from flexor.evaluate.served import ServerAddress, client_errors
from flexor_client import ActionLimits, ClientError, RealTimePlayer, RemotePolicy, RobotNames, drive

ROBOT_ANSWER_S = 5.0  # then the connection is made anew; the robot holds long before
PARTS = ("observation_features", "action_features", "get_observation", "send_action", "connect", "disconnect")


def make_robot(where: str) -> Any:
    """What the function in `FILE.py:FUNCTION` or `package.module:FUNCTION` returns: a robot of LeRobot's."""
    place, _, name = where.rpartition(":")
    try:
        namespace = runpy.run_path(place) if place.endswith(".py") else vars(importlib.import_module(place))
    except (OSError, ImportError, ValueError) as error:
        raise ConfigError(
            f"--robot={where}: {place or 'it'} can't be imported: {error}. Give FILE.py:FUNCTION or "
            "package.module:FUNCTION; the function returns a robot."
        ) from error
    if not callable(namespace.get(name)):
        raise ConfigError(f"--robot={where}: {place} has no function {name}.")
    robot = namespace[name]()
    missing = [part for part in PARTS if not hasattr(robot, part)]
    if missing:
        raise ConfigError(
            f"--robot={where}: what {name} returned is not a LeRobot robot: it has no {missing[0]}."
        )
    return robot


@dataclass
class RobotSession:
    """How a robot is driven."""

    task: str
    fps: float
    episodes: int
    seconds: float
    """Of an episode."""
    execute: int | None = None
    when_lost: str = "finish"
    rename: Mapping[str, str] = field(default_factory=dict)
    limits: ActionLimits | None = None
    beyond_training: float | None = 1.0
    codec: str = "h264"

    def player(self, policy: RemotePolicy, clock: Callable[[], float]) -> RealTimePlayer:
        return RealTimePlayer(
            policy,
            self.fps,
            execute=self.execute,
            when_lost=self.when_lost,
            limits=self.limits,
            beyond_training=self.beyond_training,
            clock=clock,
        )


def record_robot(
    root: Path,
    server: ServerAddress,
    robot: Any,
    session: RobotSession,
    *,
    before_episode: Callable[[int], None] = lambda number: None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, int]:
    """Drive the robot through episodes, in real time, and write them into the new folder `root`.

    An error or Ctrl-C ends the recording: the episode under way is dropped, those before it are kept.
    """
    names = RobotNames(robot, session.rename)
    counts = {"episodes": 0, "frames": 0, "held": 0}
    with client_errors(), server.open(ROBOT_ANSWER_S, reconnect_s=0.0) as policy:
        player = session.player(policy, clock)
        features, robot_type = robot_features(robot, names), getattr(robot, "name", None)
        writer = DatasetWriter(root, session.fps, features, robot_type=robot_type, codec=session.codec)
        stopped: BaseException | None = None
        robot.connect()
        try:
            for number in range(session.episodes):
                before_episode(number)
                frames = RobotFrames(writer, names)
                report = drive(
                    robot,
                    player,
                    fps=session.fps,
                    task=session.task,
                    steps=max(1, round(session.seconds * session.fps)),
                    episode=number,
                    rename=session.rename,
                    on_step=frames.add,
                    clock=clock,
                    sleep=sleep,
                )
                counts["episodes"] += 1
                counts["frames"] += writer.length
                counts["held"] += report.idle_steps
                writer.save_episode(session.task)
                if progress is not None:
                    progress(number + 1, session.episodes)
        except (ClientError, FlexorError, KeyboardInterrupt) as error:
            stopped = error
        finally:
            robot.disconnect()
        _finish(writer, counts["episodes"], stopped)
    return counts


def _finish(writer: DatasetWriter, episodes: int, stopped: BaseException | None) -> None:
    """Keep the episodes that are whole, and say why there are no more."""
    writer.discard_episode()
    if episodes:
        writer.close()
    if isinstance(stopped, KeyboardInterrupt):
        raise stopped
    if stopped is not None:
        recorded = f"{episodes} episodes before it are kept in {writer.root}"
        outcome = recorded if episodes else "Nothing was recorded"
        raise FlexorError(f"{stopped} {outcome}.") from stopped


class RobotFrames:
    """The frames of one episode. Where the robot held, its action is the position that it held."""

    def __init__(self, writer: DatasetWriter, names: RobotNames):
        self.writer, self.names = writer, names
        self.last: np.ndarray | None = None

    def add(self, observation: Mapping[str, Any], executed: np.ndarray | None) -> None:
        if executed is None and self.last is None:
            return  # it waits for the first chunk: nothing was done
        action = self._held_position(observation) if executed is None else executed
        self.last = action
        self.writer.add_frame({**observation, "action": np.asarray(action, np.float32)})

    def _held_position(self, observation: Mapping[str, Any]) -> np.ndarray:
        numbers = self.names.numbers
        assert self.last is not None
        if not all(name in numbers for name in self.names.actions):
            return self.last
        state: np.ndarray = observation["observation.state"]
        return state[[numbers.index(name) for name in self.names.actions]]


def robot_features(robot: Any, names: RobotNames) -> dict[str, dict[str, Any]]:
    """The features of a dataset of this robot, under the names that a policy gets."""
    features: dict[str, dict[str, Any]] = {}
    axes = ["height", "width", "channels"]
    for name, policy_name in names.cameras.items():
        shape = tuple(robot.observation_features[name])
        features[policy_name] = {"dtype": "video", "shape": shape, "names": axes}
    for policy_name in names.renamed_numbers.values():
        features[policy_name] = {"dtype": "float32", "shape": (1,), "names": None}
    if names.numbers:
        numbers = list(names.numbers)
        features["observation.state"] = {"dtype": "float32", "shape": (len(numbers),), "names": numbers}
    features["action"] = {"dtype": "float32", "shape": (len(names.actions),), "names": list(names.actions)}
    return features
