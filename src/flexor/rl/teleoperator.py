"""Anything with the interface of LeRobot's teleoperators takes over: a gamepad, a leader arm, a class of the user's."""

from __future__ import annotations

import importlib
import runpy
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np

from flexor.config.rl import RLConfig
from flexor.core.errors import ConfigError, FlexorError
from flexor.core.log import log

PARTS = ("connect", "get_action", "get_teleop_events", "disconnect")
DELTAS = ("delta_x", "delta_y", "delta_z", "gripper")  # LeRobot's names of a gamepad's action
GRIPPER, STAY, LAST_CHOICE = "gripper", 1.0, 2.0  # a gripper's choices: 0 close, 1 stay, 2 open
DEFAULT_FPS = 10.0  # of an environment that does not say


class Events(NamedTuple):
    """What somebody who watches says in a step: LeRobot's events."""

    success: bool = False
    """The task is done, and the reward is 1."""
    terminate_episode: bool = False
    rerecord_episode: bool = False
    """The episode ends, and is not learned from."""

    def applied(self, outcome: dict[str, float]) -> dict[str, float]:
        """The outcome of a step, which they change."""
        changes: dict[str, float] = {}
        if self.success:
            changes |= {"reward": 1.0, "success": 1.0}
        if self.terminate_episode:
            changes["terminated"] = 1.0
        if self.rerecord_episode:
            changes |= {"truncated": 1.0, "discarded": 1.0}
        return {**outcome, **changes}


NO_EVENTS = Events()


class Teleoperator(Protocol):
    """The part of LeRobot's interface that is used, in this order in each step: the action, then the events."""

    def connect(self) -> None: ...

    def get_action(self) -> Any:
        """Numbers by name (LeRobot's delta_x, delta_y, delta_z and gripper, or one for each joint), or a vector."""

    def get_teleop_events(self) -> Mapping[Any, bool]:
        """is_intervention, terminate_episode, success, rerecord_episode."""
        ...

    def disconnect(self) -> None: ...


def make_teleoperator(where: str, settings: Mapping[str, Any]) -> Teleoperator:
    """An object of the class in `package.module:CLASS` or `FILE.py:CLASS`. LeRobot's classes take their config."""
    label = f"rl.intervener={where}"
    module, _, name = where.rpartition(":")
    try:
        namespace = (
            runpy.run_path(module) if module.endswith(".py") else vars(importlib.import_module(module))
        )
    except (OSError, ImportError, ValueError) as error:
        raise ConfigError(
            f"{label}: {module or 'it'} can't be imported: {error}. Use none, scripted, keyboard, or a class of "
            "yours or LeRobot's: package.module:CLASS or FILE.py:CLASS."
        ) from error
    make = namespace.get(name)
    if not callable(make):
        raise ConfigError(f"{label}: {module} has no class {name}.")
    config_class = getattr(make, "config_class", None)
    try:
        teleoperator = make(**settings) if config_class is None else make(config_class(**settings))
    except TypeError as error:
        raise ConfigError(
            f"{label} does not accept rl.intervener_settings={dict(settings)}: {error}"
        ) from error
    missing = [part for part in PARTS if not callable(getattr(teleoperator, part, None))]
    if missing:
        raise ConfigError(f"{label}: {name} is no teleoperator like LeRobot's: it has no {missing[0]}().")
    made: Teleoperator = teleoperator
    return made


class TeleoperatorIntervener:
    """A person takes over with a teleoperator. The environment runs no faster than in real time."""

    def __init__(self, teleoperator: Teleoperator, env: gymnasium.Env[Any, Any], settings: RLConfig):
        self.teleoperator, self.label = teleoperator, settings.intervener
        self.terminate_on_success = settings.terminate_on_success
        space = env.action_space
        assert isinstance(space, gymnasium.spaces.Box)
        self.low, self.high = space.low, space.high
        self.names = _action_names(env, len(self.low))
        self.gripper = float(self.high[-1])  # the last command
        fps = settings.fps
        if fps is None:
            fps = float(env.metadata.get("render_fps") or DEFAULT_FPS)
        self.period = 1 / fps if fps else 0.0
        self.next_step = time.monotonic()
        self.acting = False
        self.newest_events = NO_EVENTS
        self._call("connect")

    def action(self, env: gymnasium.Env[Any, Any], step: int) -> np.ndarray | None:
        self._wait()
        action = self._call("get_action")
        events = {getattr(key, "value", key): bool(on) for key, on in self._call("get_teleop_events").items()}
        success, terminate, rerecord = (
            events.get(name, False) for name in ("success", "terminate_episode", "rerecord_episode")
        )
        self.newest_events = Events(success, terminate or (success and self.terminate_on_success), rerecord)
        acting = events.get("is_intervention", False)
        if acting != self.acting:
            log.info("step %d of the episode: %s", step, "somebody took over" if acting else "handed back")
        self.acting = acting
        return self._vector(action) if acting else None

    def events(self) -> Events:
        return self.newest_events

    def close(self) -> None:
        try:
            self._call("disconnect")
        except FlexorError as error:  # the run is over anyway, and may have another error to report
            log.warning("%s", error)

    def _call(self, part: str) -> Any:
        try:
            return getattr(self.teleoperator, part)()
        except (FlexorError, KeyboardInterrupt):
            raise
        except Exception as error:  # whatever a device or its driver does
            raise FlexorError(
                f"rl.intervener={self.label}: {part}() failed: {type(error).__name__}: {error}. Check the device; "
                "`flexor resume` goes on with the run."
            ) from error

    def _wait(self) -> None:
        """Until a period after the step before."""
        now = time.monotonic()
        if self.next_step > now:
            time.sleep(self.next_step - now)
        self.next_step = max(self.next_step, now) + self.period

    def _vector(self, action: Any) -> np.ndarray:
        """The action in the order and the units of the environment."""
        if isinstance(action, Mapping) and DELTAS[0] in action:
            unknown = [name for name in self.names if name not in DELTAS]
            if unknown:
                raise FlexorError(
                    f"rl.intervener={self.label} gives {', '.join(action)}, but the environment's actions are "
                    f"{', '.join(self.names)}: make them steps of the end effector with "
                    "--env.processor.inverse_kinematics.end_effector_step_sizes."
                )
            values = [float(action.get(name, STAY if name == GRIPPER else 0.0)) for name in self.names]
            if self.names[-1] == GRIPPER:
                values[-1] = self._gripper(values[-1])
        else:
            values = [*action.values()] if isinstance(action, Mapping) else action
        vector = np.asarray(values, np.float32).reshape(-1)
        if vector.shape != self.low.shape or not np.isfinite(vector).all():
            raise FlexorError(
                f"rl.intervener={self.label} gave {vector.tolist()}, but an action is {len(self.low)} finite numbers."
            )
        return vector

    def _gripper(self, choice: float) -> float:
        """The command for a choice. Where commands are not choices themselves, to stay is to repeat the last one."""
        low, high = float(self.low[-1]), float(self.high[-1])
        if choice != STAY or (low, high) == (0.0, LAST_CHOICE):
            self.gripper = low + choice / LAST_CHOICE * (high - low)
        return self.gripper


def _action_names(env: gymnasium.Env[Any, Any], count: int) -> list[str]:
    """What the environment's actions are called: its own names, or LeRobot's, by which a gamepad's are assigned."""
    if env.has_wrapper_attr("action_names"):
        return list(env.get_wrapper_attr("action_names"))
    return [*DELTAS[:count], *(f"number {index}" for index in range(len(DELTAS), count))]
