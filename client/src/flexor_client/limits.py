"""Limits of a robot's actions, checked on the robot's side before an action leaves.

A policy may be wrong, a server may serve another policy, a network may be anybody's. So the last check is here. What
is not finite is always refused (`check_actions`), and so is what is far outside of the policy's training data
(`TrainingRange`); a robot's own limits come on top of that (`ActionLimits`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Union

import numpy as np

from flexor_client.errors import ClientError, LimitError

log = logging.getLogger("flexor_client")

Bound = Union[float, Sequence[float], np.ndarray, None]
LEAST_WIDTH = 0.01  # of the widest range: a joint that never moved in the training data may be off by this


def check_actions(actions: Any, dimensions: int) -> None:
    """Refuse what is no action [A], or no chunk of them [H, A], of finite numbers."""
    if not isinstance(actions, np.ndarray) or actions.ndim != dimensions or actions.dtype.kind != "f":
        is_array = isinstance(actions, np.ndarray)
        form = f"{actions.dtype} {list(actions.shape)}" if is_array else type(actions).__name__
        raise LimitError(f"An action is {form}, not floating-point numbers: is it a policy for this robot?")
    if not actions.size:
        raise LimitError("There are no actions in what the policy predicted.")
    if not np.isfinite(actions).all():
        wrong = actions[~np.isfinite(actions).reshape(len(actions), -1).all(1)][0]
        raise LimitError(
            f"An action is not finite: {np.ravel(wrong).tolist()}. It was not sent. The policy's weights or its "
            "statistics are broken."
        )


class TrainingRange:
    """The range of each part of an action in a policy's training data, from `low` to `high`.

    `beyond`: how far outside of it an action may be, in widths of the range.
    """

    def __init__(
        self,
        low: Sequence[float],
        high: Sequence[float],
        beyond: float = 1.0,
        names: Sequence[str] | None = None,
    ):
        if not beyond >= 0:
            raise ClientError(
                f"beyond_training={beyond}: give how far outside of its training data a policy may go, in widths of "
                "that range, or None."
            )
        self.low, self.high, self.names = np.asarray(low, np.float64), np.asarray(high, np.float64), names
        width = self.high - self.low
        margin = beyond * np.maximum(width, LEAST_WIDTH * width.max(initial=0.0)) + 1e-6
        self.least, self.most = self.low - margin, self.high + margin

    @classmethod
    def of(cls, metadata: Mapping[str, Any], beyond: float | None) -> TrainingRange | None:
        """Of a server's policy; None if it does not say, or nobody wants to know."""
        spans = metadata.get("action_range")
        if spans is None or beyond is None or beyond == math.inf:
            return None
        return cls(spans["low"], spans["high"], beyond, metadata.get("action_names"))

    def check(self, action: np.ndarray) -> None:
        """Refuse an action [A] that is too far outside."""
        if action.shape != self.low.shape:
            raise LimitError(
                f"An action has {len(action)} parts, but the policy was trained on {len(self.low)}."
            )
        outside = ~((self.least <= action) & (action <= self.most))
        if not outside.any():
            return
        part = int(np.argmax(outside))
        raise LimitError(
            f"The action's {_name(self.names, part)} is {action[part]:.4g}, but in the training data it is from "
            f"{self.low[part]:.4g} to {self.high[part]:.4g}. It was not sent. Check that it is the right policy and "
            "that its files are intact. If the robot may go that far, raise beyond_training, or set it to None (in "
            "flexor record: --beyond-training=any)."
        )


def _name(names: Sequence[str] | None, part: int) -> str:
    return f"part {part}" if names is None or part >= len(names) else names[part]


class ActionLimits:
    """Range and step of each part of an action; a bound is one number for all parts, or one for each.

    `low`, `high`: the range. `step`: how much a part may differ from the action before it. `when_exceeded`: "clamp"
    brings the action into the limits, "error" raises LimitError. NaN, infinity and a wrong number of parts are always
    errors. `names` of the parts make messages readable.
    """

    def __init__(
        self,
        low: Bound = None,
        high: Bound = None,
        step: Bound = None,
        when_exceeded: str = "clamp",
        names: Sequence[str] | None = None,
    ):
        if when_exceeded not in ("clamp", "error"):
            raise ClientError(f'when_exceeded={when_exceeded!r}: use "clamp" or "error".')
        self.low = np.asarray(-np.inf if low is None else low, np.float64)
        self.high = np.asarray(np.inf if high is None else high, np.float64)
        self.step = np.asarray(np.inf if step is None else step, np.float64)
        self.when_exceeded = when_exceeded
        self.names = None if names is None else list(names)
        self.clamped = 0  # actions that were changed
        self._check_bounds()

    def _check_bounds(self) -> None:
        for name in ("low", "high", "step"):
            bound = getattr(self, name)
            if bound.ndim > 1 or np.isnan(bound).any():
                raise ClientError(
                    f"{name}={bound.tolist()}: give a number, or one for each part of an action."
                )
            if bound.ndim and self.names is not None and len(bound) != len(self.names):
                raise ClientError(
                    f"{name} has {len(bound)} values for {len(self.names)} parts: {self.names}."
                )
        if not (self.step > 0).all():
            raise ClientError(f"step={self.step.tolist()}: must be more than 0, or the robot could not move.")
        sizes = {bound.shape for bound in (self.low, self.high, self.step) if bound.ndim}
        if len(sizes) > 1:
            raise ClientError(
                f"low, high and step are for {sorted(s[0] for s in sizes)} parts: make them equal."
            )
        if (self.low == np.inf).any() or (self.high == -np.inf).any():
            raise ClientError("low and high must leave finite numbers between them.")
        if not (self.low <= self.high).all():
            raise ClientError(f"low={self.low.tolist()} is above high={self.high.tolist()}.")

    def __call__(self, action: np.ndarray, last: np.ndarray | None = None) -> np.ndarray:
        """The action [A] that may be executed after `last`, or an error. Without `last` any step is allowed."""
        requested = np.asarray(action)
        self._check_form(requested, last)
        # The range first: from outside of it, a robot is led back in, step by step.
        allowed = np.clip(requested.astype(np.float64), self.low, self.high)
        if last is not None:
            last = np.asarray(last, np.float64)
            allowed = np.clip(allowed, last - self.step, last + self.step)
        with np.errstate(over="ignore"):
            allowed = allowed.astype(requested.dtype)
        if not np.isfinite(allowed).all():
            raise LimitError(f"The limits are numbers that an action of {requested.dtype} can't be.")
        # Bounds and steps are float64, actions float32: what differs only by rounding is not exceeded.
        exceeded = ~np.isclose(allowed, requested, rtol=1e-5, atol=1e-6)
        if not exceeded.any():
            return requested
        message = self._describe(requested, allowed, int(np.argmax(exceeded)), last)
        if self.when_exceeded == "error":
            raise LimitError(
                f"{message}. It was not sent. Check that the server serves the right policy; if the robot may do this, "
                "change the limits."
            )
        self.clamped += 1
        if self.clamped == 1:
            log.warning("%s. It is clamped; later ones are too, without a message.", message)
        return allowed

    def _check_form(self, action: np.ndarray, last: np.ndarray | None) -> None:
        parts = len(self.names) if self.names is not None else None
        for bound in (self.low, self.high, self.step):
            parts = len(bound) if bound.ndim else parts
        if action.ndim != 1 or action.dtype.kind != "f" or (parts is not None and len(action) != parts):
            raise LimitError(
                f"An action is {action.dtype} {list(action.shape)}, not {parts or 'some'} floating-point numbers: "
                "the server serves a policy for another robot."
            )
        check_actions(action, 1)
        if last is not None and np.shape(last) != action.shape:
            raise LimitError(f"An action has {len(action)} parts, the one before it {list(np.shape(last))}.")
        if last is not None and not np.isfinite(last).all():  # a step from there is none that can be limited
            raise LimitError(
                f"The robot's position is not finite: {np.ravel(last).tolist()}. Nothing was sent. Check its sensors."
            )

    def _describe(
        self, requested: np.ndarray, allowed: np.ndarray, part: int, last: np.ndarray | None
    ) -> str:
        name = _name(self.names, part)
        after = "" if last is None else f" after {float(last[part]):.4g}"
        return f"The action's {name} is {requested[part]:.4g}{after}; the limits allow {allowed[part]:.4g}"
