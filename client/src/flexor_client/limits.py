"""Limits of a robot's actions, checked on the robot's side before an action leaves.

A policy may be wrong, a server may serve another policy, a network may be anybody's. So the last check is here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Union

import numpy as np

from flexor_client.errors import ClientError, LimitError

log = logging.getLogger("flexor_client")

Bound = Union[float, Sequence[float], np.ndarray, None]


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
        if not (self.low <= self.high).all():
            raise ClientError(f"low={self.low.tolist()} is above high={self.high.tolist()}.")

    def __call__(self, action: np.ndarray, last: np.ndarray | None = None) -> np.ndarray:
        """The action [A] that may be executed after `last`, or an error. Without `last` any step is allowed."""
        wanted = np.asarray(action)
        self._check_form(wanted, last)
        # The range first: from outside of it, a robot is led back in, step by step.
        allowed = np.clip(wanted.astype(np.float64), self.low, self.high)
        if last is not None:
            last = np.asarray(last, np.float64)
            allowed = np.clip(allowed, last - self.step, last + self.step)
        allowed = allowed.astype(wanted.dtype)
        # Bounds and steps are float64, actions float32: what differs only by rounding is not exceeded.
        exceeded = ~np.isclose(allowed, wanted, rtol=1e-5, atol=1e-6)
        if not exceeded.any():
            return wanted
        told = self._told(wanted, allowed, int(np.argmax(exceeded)), last)
        if self.when_exceeded == "error":
            raise LimitError(
                f"{told}. It was not sent. Check that the server serves the right policy; if the robot may do this, "
                "change the limits."
            )
        self.clamped += 1
        if self.clamped == 1:
            log.warning("%s. It is clamped; later ones are too, without a message.", told)
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
        if not np.isfinite(action).all():
            raise LimitError(
                f"An action is not finite: {action.tolist()}. It was not sent. The policy's weights or its statistics "
                "are broken."
            )
        if last is not None and np.shape(last) != action.shape:
            raise LimitError(f"An action has {len(action)} parts, the one before it {list(np.shape(last))}.")

    def _told(self, wanted: np.ndarray, allowed: np.ndarray, part: int, last: np.ndarray | None) -> str:
        name = self.names[part] if self.names is not None else f"part {part}"
        after = "" if last is None else f" after {float(last[part]):.4g}"
        return f"The action's {name} is {wanted[part]:.4g}{after}; the limits allow {allowed[part]:.4g}"
