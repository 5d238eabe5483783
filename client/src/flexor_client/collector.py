"""A robot that a policy learns on: the learner's machine chooses its actions and learns from what it sends.

It needs no torch. What the robot saw and did is on its own disk before anything else happens, and is handed over once,
in its order, also if the learner was gone for a while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flexor_client.address import Address
from flexor_client.errors import ClientError, ServerLostError
from flexor_client.jpeg import encode_jpeg
from flexor_client.learner import LearnerLink
from flexor_client.limits import ActionLimits, check_actions
from flexor_client.players import WHEN_LOST
from flexor_client.spool import Spool

Observation = Mapping[str, Any]
WAIT_S = 0.2  # between two looks at how far the learner is


class Collector:
    """One robot. Call `begin` at the start of an episode, and `step` after every step.

    `shapes`: of each observation, under the policy's names; [C, H, W] of an image. `low` and `high`: the limits of
    actions, which no action leaves. `ranges`: {name: (low, high)} of observations, where they are known; the policy's
    inputs are normalised by them. `limits`: more limits, such as the largest step. `spool`: a folder for what was not
    handed over yet; without one it is in memory. `jpeg`: send images compressed, with this quality. `lost_after_s`:
    how long to wait for an action. `when_lost`: "hold" or "finish": there is no action then (None), until the learner
    is back; "stop": ServerLostError. The policy chooses one action at a time, so that nothing is left to finish.
    """

    def __init__(
        self,
        url: str,
        *,
        actor: str,
        shapes: Mapping[str, Sequence[int]],
        low: Sequence[float],
        high: Sequence[float],
        fps: float,
        task: str = "",
        ranges: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
        limits: ActionLimits | None = None,
        spool: str | Path | None = None,
        api_key: str | None = None,
        certificate: str | Path | None = None,
        jpeg: int | None = None,
        timeout_s: float = 30.0,
        lost_after_s: float = 2.0,
        when_lost: str = "hold",
    ):
        if when_lost not in WHEN_LOST:
            raise ClientError(f"when_lost={when_lost!r}: use {', '.join(WHEN_LOST)}.")
        self.shapes = {name: tuple(int(size) for size in shape) for name, shape in shapes.items()}
        self.low, self.high = (np.asarray(bound, np.float32) for bound in (low, high))
        if self.low.ndim != 1 or self.low.shape != self.high.shape or not (self.low <= self.high).all():
            raise ClientError(
                "low and high must be two lists of numbers, the limits of each part of an action."
            )
        self.limits, self.jpeg = limits, jpeg
        self.lost_after_s, self.when_lost = lost_after_s, when_lost
        environment = {
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "low": self.low.tolist(),
            "high": self.high.tolist(),
            "ranges": {name: [_plain(bound) for bound in pair] for name, pair in (ranges or {}).items()},
            "fps": float(fps),
            "task": task,
        }
        address = Address(url, api_key, certificate)
        self.link = LearnerLink(address, actor, environment, Spool(spool), timeout_s=timeout_s)
        self._first: dict[str, np.ndarray] | None = None  # an observation that was not recorded yet
        self._last: np.ndarray | None = None  # the last action
        self._late = 0  # a record that was not answered in time
        self._in_episode = False

    @property
    def finished(self) -> bool:
        """Whether the learner has all steps that it wanted."""
        return self.link.finished

    @property
    def lost(self) -> bool:
        """Whether the learner can't be reached, or does not answer in time."""
        return not self.link.connected or self.link.spool.acknowledged < self._late

    def begin(self, observation: Observation, position: np.ndarray | None = None) -> np.ndarray | None:
        """Start an episode with what the robot sees; the first action, or None: hold.

        `position`: the action that would keep the robot where it is; its first step is limited then. If the learner has
        fallen behind, it gets time to catch up.
        """
        self._first, self._in_episode = self._checked(observation), True
        self._last = None if position is None else np.asarray(position, np.float32)
        link = self.link
        link.wait(lambda: link.connected or link.finished or link.lost is not None, self.lost_after_s)
        behind = int(self.link.welcome.get("max_lag", 0))
        while self.link.connected and not self.finished and self.link.behind > behind:
            self.link.wait(lambda: self.link.behind <= behind or not self.link.connected, WAIT_S)
        return self._ask()

    def step(
        self,
        action: np.ndarray | None,
        observation: Observation,
        reward: float = 0.0,
        *,
        terminated: bool = False,
        truncated: bool = False,
        success: bool = False,
        intervention: bool = False,
        discarded: bool = False,
        penalty: float = 0.0,
    ) -> np.ndarray | None:
        """What the robot did and what it sees now; the next action, or None: hold, or the episode is over.

        `action`: what the robot really did, also if a person did it (`intervention`); None: it held. `terminated`: the
        task is over. `truncated`: time is up, or somebody ended the episode. `discarded`: of the last step of an
        episode that is not to be learned from.
        """
        if not self._in_episode:
            raise ClientError("An episode begins with `begin`.")
        observed = self._checked(observation)
        if action is None:  # what follows begins with what it sees now: nothing is known of the time between
            self._first, self._in_episode = observed, not (terminated or truncated)
            return self._ask() if self._in_episode else None
        if self._first is not None:
            self._add(self._first, is_step=False)
            self._first = None
        outcome = {"reward": float(reward), "penalty": float(penalty)}
        flags = {"terminated": terminated, "truncated": truncated, "success": success}
        flags |= {"intervention": intervention, "discarded": discarded}
        flags = {name: bool(flag) for name, flag in flags.items()}
        number = self._add(observed, is_step=True, action=self._executed(action), **outcome, **flags)
        self._in_episode = not (terminated or truncated)
        return self._answer(number) if self._in_episode else None

    def limited(self, action: np.ndarray) -> np.ndarray:
        """An action of anybody, such as a person, within the limits. Nothing else may be executed."""
        action = np.asarray(action, np.float32)
        check_actions(action, 1)
        if action.shape != self.low.shape:
            raise ClientError(f"An action has {len(action)} parts, but the limits are for {len(self.low)}.")
        action = np.clip(action, self.low, self.high)
        return action if self.limits is None else self.limits(action, self._last)

    def close(self, timeout_s: float = 5.0) -> None:
        """Hand over what is left, for so long at most. What can't be stays in the spool for the next time."""
        self.link.close(timeout_s)

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self) -> np.ndarray | None:
        """The action for an observation that begins an episode, or follows a hold."""
        self.link.check()
        if self.lost or self.finished or self._first is None:
            return self._hold()
        number, self._first = self._add(self._first, is_step=False), None
        return self._answer(number)

    def _answer(self, number: int) -> np.ndarray | None:
        action = None if self.lost else self.link.action(number, self.lost_after_s)
        if action is None:
            self._late = number
            return self._hold()
        return self.limited(action)

    def _hold(self) -> np.ndarray | None:
        if self.when_lost == "stop" and not self.finished:
            reason = self.link.lost or f"The learner has not answered for {self.lost_after_s:g} s."
            raise ServerLostError(str(reason))
        return None

    def _executed(self, action: np.ndarray) -> np.ndarray:
        action = np.asarray(action, np.float32)
        check_actions(action, 1)
        tolerance = 1e-4 * (self.high - self.low) + 1e-6
        if (
            action.shape != self.low.shape
            or (np.abs(action - np.clip(action, self.low, self.high)) > tolerance).any()
        ):
            raise ClientError(
                f"The robot did {action.tolist()}, but its limits are {self.low.tolist()} to {self.high.tolist()}: "
                "limit every action before it is executed, with `limited`."
            )
        self._last = action
        return action

    def _add(self, observation: dict[str, np.ndarray], **fields: Any) -> int:
        observed = {name: self._compressed(value) for name, value in observation.items()}
        return self.link.add({**fields, "update": self.link.update, "observation": observed})

    def _compressed(self, value: np.ndarray) -> Any:
        return encode_jpeg(value, self.jpeg) if self.jpeg is not None and value.dtype == np.uint8 else value

    def _checked(self, observation: Observation) -> dict[str, np.ndarray]:
        """The observation as the learner takes it."""
        checked = {}
        for name, shape in self.shapes.items():
            if name not in observation:
                raise ClientError(
                    f"The observation has no {name}, only {', '.join(observation) or 'nothing'}."
                )
            value = np.asarray(observation[name])
            if len(shape) == 3 and value.shape == (*shape[1:], shape[0]) and value.dtype == np.uint8:
                value = value.transpose(2, 0, 1)
            value = value if len(shape) == 3 else value.astype(np.float32)
            if value.shape != shape or (len(shape) == 3 and value.dtype != np.uint8):
                raise ClientError(f"{name} is {value.dtype} {list(value.shape)}, not {list(shape)}.")
            if not np.isfinite(value).all():
                raise ClientError(f"{name} is not finite: check the robot's sensors.")
            checked[name] = np.ascontiguousarray(value)
        return checked


def _plain(bound: Sequence[float]) -> list[float]:
    return [float(value) for value in bound]
