"""What shows whether a run learns: values against returns, the entropy's target, and where its time goes."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
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


@dataclass
class EpisodeReturn:
    """An episode under way."""

    first: np.ndarray  # record
    action: np.ndarray | None = None  # the first one
    discount: float = 1.0  # of the next reward
    received: float = 0.0


class Measures:
    """Of the episodes of all actors. `env`: the environment of this process, if it has one."""

    def __init__(self, learner: Learner, env: TimedEnv | None = None):
        self.learner, self.env = learner, env
        self.discount = float(learner.algorithm.settings["discount"])
        self.values: deque[Tensor] = deque(maxlen=WINDOW)  # of the first action of each episode
        self.returns: deque[float] = deque(maxlen=WINDOW)  # discounted
        self.episodes: dict[int, EpisodeReturn] = {}  # by actor
        self.before = self._clocks()

    def add(self, record: np.ndarray) -> None:
        """A record that was collected. At the end of an episode, the critics say what they expected of it."""
        row, actor = record[0], int(record["actor"][0])
        if not row["is_step"]:
            self.episodes[actor] = EpisodeReturn(record)
            return
        episode = self.episodes.get(actor)
        if episode is None:  # it began before the run was resumed
            return
        if episode.action is None:
            episode.action = row["action"]
        episode.received += episode.discount * float(row["reward"])
        episode.discount *= self.discount
        if row["terminated"] or row["truncated"]:
            del self.episodes[actor]
            if not row["discarded"]:
                self._add_episode(episode)

    def _add_episode(self, episode: EpisodeReturn) -> None:
        assert episode.action is not None
        observation = {name: episode.first[name][0] for name in observed_names(episode.first.dtype)}
        self.values.append(self.learner.value(observation, episode.action))
        self.returns.append(episode.received)

    def _clocks(self) -> tuple[float, float, float]:
        return time.perf_counter(), self.env.seconds if self.env else 0.0, self.learner.seconds

    def report(self) -> dict[str, float]:
        """For a line of metrics."""
        now = self._clocks()
        elapsed, acted, learned = (after - before for after, before in zip(now, self.before))
        self.before = now
        values = {
            "target_entropy": self.learner.algorithm.target_entropy,
            "learning_share": learned / max(elapsed, 1e-9),
        }
        if self.env is not None:
            values["environment_share"] = acted / max(elapsed, 1e-9)
        if self.values:
            values["first_q"] = float(np.mean([float(value) for value in self.values]))
            values["discounted_return"] = float(np.mean(self.returns))
        return values
