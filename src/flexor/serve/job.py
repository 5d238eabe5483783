"""A request on its way through the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flexor.serve.options import RequestOptions
from flexor.serve.request import PolicyRequest

ANSWER = (
    *("queued", "started", "finished", "batch", "actions", "error", "failure", "expired", "step", "episode"),
    "in_use",
)


@dataclass(eq=False)
class ServeJob:
    """A request, from its arrival to its answer."""

    request: PolicyRequest
    session: Any
    """The robot's `Session`; in a process without the model, its number."""
    arrived: float
    """When its frame was there, by time.perf_counter(); like the times below."""
    alive: Callable[[], bool] = lambda: True
    queued: float = 0.0
    started: float = 0.0
    finished: float = 0.0
    batch: int = 0
    """How many were answered together."""
    actions: np.ndarray | None = None
    error: str | None = None
    failure: str = "failed"
    """As which result an error is counted."""
    expired: bool = False
    in_use: bool = False
    """It expired, but the model reads its observation until `release` is called."""
    release: Callable[[], None] = lambda: None
    step: int = 0
    """The robot's, for which it asks."""
    episode: int = 0
    starts_episode: bool = False
    """Whether its observation is the first of an episode."""
    due: float | None = field(init=False)
    """When the answer must be ready."""

    def __post_init__(self) -> None:
        self.due = self.options.due(self.arrived)

    @property
    def options(self) -> RequestOptions:
        return self.request.options or RequestOptions()

    def answer(self) -> list[Any]:
        """What is known when it is answered, for the process that asked."""
        return [getattr(self, name) for name in ANSWER]

    def take(self, answer: list[Any]) -> None:
        for name, value in zip(ANSWER, answer, strict=True):
            setattr(self, name, value)
