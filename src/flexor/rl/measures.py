"""What shows whether a run learns: values against returns, the entropy's target, and where its time goes."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import gymnasium
import numpy as np
from torch import Tensor

from flexor.rl.learner import Learner
from flexor.rl.records import observed_names

WINDOW = 20  # episodes


class TimedEnv(gymnasium.Wrapper):
    """An environment that adds up the time that its steps take."""

    seconds = 0.0

    def step(self, action: Any) -> Any:
        start = time.perf_counter()
        try:
            return self.env.step(action)
        finally:
            self.seconds += time.perf_counter() - start

    def reset(self, **settings: Any) -> Any:
        start = time.perf_counter()
        try:
            return self.env.reset(**settings)
        finally:
            self.seconds += time.perf_counter() - start


class Measures:
    """Of one environment's episodes."""

    def __init__(self, learner: Learner, env: TimedEnv):
        self.learner, self.env = learner, env
        self.discount = float(learner.algorithm.settings["discount"])
        self.values: deque[Tensor] = deque(maxlen=WINDOW)  # of the first action of each episode
        self.returns: deque[float] = deque(maxlen=WINDOW)  # discounted
        self.first: np.ndarray | None = None  # record of the episode
        self.action = np.zeros(0)
        self.weight, self.received = 1.0, 0.0
        self.before = time.perf_counter(), env.seconds, learner.seconds

    def add(self, record: np.ndarray) -> None:
        """A record that was collected. At the end of an episode, the critics say what they expected of it."""
        if not record["is_step"][0]:
            self.first, self.weight, self.received = record, 1.0, 0.0
            return
        if self.first is None:  # the episode began before the run was resumed
            return
        if self.weight == 1.0:
            self.action = record["action"][0]
        self.received += self.weight * float(record["reward"][0])
        self.weight *= self.discount
        if record["terminated"][0] or record["truncated"][0]:
            names = observed_names(self.first.dtype)
            observation = {name: self.first[name][0] for name in names}
            self.values.append(self.learner.value(observation, self.action))
            self.returns.append(self.received)

    def report(self) -> dict[str, float]:
        """For a line of metrics."""
        now = time.perf_counter(), self.env.seconds, self.learner.seconds
        elapsed, acted, learned = (after - before for after, before in zip(now, self.before))
        self.before = now
        values = {
            "target_entropy": self.learner.algorithm.target_entropy,
            "environment_share": acted / max(elapsed, 1e-9),
            "learning_share": learned / max(elapsed, 1e-9),
        }
        if self.values:
            values["first_q"] = float(np.mean([float(value) for value in self.values]))
            values["discounted_return"] = float(np.mean(self.returns))
        return values
