"""The options of a request: what a client asks for besides its observation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flexor.core.typed import closest
from flexor.serve.limits import BadRequest
from flexor.serve.settings import Reply
from flexor_client.wire import OPTIONS

LONGEST_NAME = 64
LARGEST_NUMBER = 2**53  # of an episode or step


@dataclass(frozen=True)
class RequestOptions:
    """The fields under the key `flexor` of an observation: see flexor_client/wire.py."""

    id: int | str | None = None
    session: str = ""
    reset: bool = False
    episode: int | None = None
    step: int | None = None
    reply: Reply | None = None
    previous: np.ndarray | None = None
    delay: int = 0
    deadline_ms: float | None = None
    age_ms: float = 0.0

    @classmethod
    def read(cls, fields: Any, action_size: int, horizon: int) -> RequestOptions | None:
        """The options in a message; None if it has none."""
        if fields is None:
            return None
        if not isinstance(fields, dict):
            raise BadRequest(f"`{OPTIONS}` must be a map of options, not {kind_of(fields)}.")
        unknown = [name for name in fields if name not in cls.__dataclass_fields__]
        if unknown:
            name = unknown[0][:LONGEST_NAME]
            raise BadRequest(
                f"`{OPTIONS}` has an unknown option {name!r}. {closest(str(name), cls.__dataclass_fields__)}"
            )
        options = cls(**fields)
        options._check()
        if options.previous is None:
            return options
        return replace(options, previous=_previous(options.previous, action_size, horizon))

    def _check(self) -> None:
        short = isinstance(self.id, str) and len(self.id) <= LONGEST_NAME
        fits = self.id is None or short or _is_count(self.id)
        _require("id", fits, f"a number or at most {LONGEST_NAME} characters")
        fits = isinstance(self.session, str) and len(self.session) <= LONGEST_NAME
        _require("session", fits, f"at most {LONGEST_NAME} characters")
        _require("reset", isinstance(self.reset, bool), "true or false")
        _require("episode", self.episode is None or _is_count(self.episode), "a whole number from 0")
        _require("step", self.step is None or _is_count(self.step), "a whole number from 0")
        named = isinstance(self.reply, str) and self.reply in ("chunk", "action")
        _require("reply", self.reply is None or named, "chunk or action")
        _require("delay", _is_count(self.delay), "a whole number from 0")
        for name in ("deadline_ms", "age_ms"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e12
            _require(name, (value is None and name == "deadline_ms") or number, "milliseconds, from 0")

    def due(self, arrived: float) -> float | None:
        """When the answer must be ready, for an observation that arrived then; None: there is no hurry."""
        return None if self.deadline_ms is None else arrived + (self.deadline_ms - self.age_ms) / 1e3


def _previous(value: Any, action_size: int, horizon: int) -> np.ndarray:
    """The chunk that is being executed, float32 [K, A]. What reaches beyond a new chunk has no use."""
    is_float = isinstance(value, np.ndarray) and value.dtype.kind == "f"
    fits = is_float and value.ndim == 2 and len(value) > 0 and value.shape[1] == action_size
    _require("previous", fits, f"a float array [at least 1, {action_size}]")
    with np.errstate(over="ignore"):
        actions: np.ndarray = value[:horizon].astype(np.float32)
    _require("previous", bool(np.isfinite(actions).all()), "finite")
    return actions


def _require(name: str, fits: bool, form: str) -> None:
    if not fits:
        raise BadRequest(f"`{OPTIONS}.{name}` must be {form}.")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_NUMBER


def kind_of(value: Any) -> str:
    """What a value is, in words."""
    return {dict: "a map", list: "a list", str: "text", type(None): "nothing"}.get(
        type(value), f"a {type(value).__name__}"
    )
