"""What a run that learns while it acts reports: returns, successes, help, and what the learner measures."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from flexor.core.log import log
from flexor.monitor.meters import as_json
from flexor.monitor.trackers import Trackers
from flexor.rl.collector import EpisodeSummary
from flexor.train.health import MetricsHealth

WINDOW = 20  # episodes that success and return are means of
SHARES = ("success_rate", "intervention_rate")
FIGURES = {  # of the log line
    "success_rate": "success",
    "return": "return",
    "intervention_rate": "help",
    "loss": "critic loss",
    "q": "Q",
    "entropy": "entropy",
    "temperature": "temperature",
    "transitions_per_s": "steps/s",
    "left_s": "left (s)",
}


class RunProgress:
    """Episodes and updates of a run, as metrics."""

    def __init__(
        self, trackers: Trackers, health: MetricsHealth, steps: int, first_step: int, batch_size: int
    ):
        self.trackers, self.steps, self.batch_size = trackers, steps, batch_size
        self.episodes: deque[EpisodeSummary] = deque(maxlen=WINDOW)
        self.counted = first_step, 0
        self.since = time.perf_counter()
        self.health = health
        self.newest: dict[str, Any] = {}

    def add_episode(self, episode: EpisodeSummary) -> None:
        if not episode.discarded:
            self.episodes.append(episode)

    def report(
        self,
        step: int,
        updates: int,
        figures: Mapping[str, Tensor] | None,
        age: float,
        more: Mapping[str, float],
    ) -> None:
        """A line of metrics. `age`: updates since those weights that acted last. `more`: other measures."""
        values: dict[str, Any] = {"updates": updates, "weights_age": age, **more, **self._episodes()}
        values |= {name: float(value) for name, value in (figures or {}).items()}
        if "critic_loss" in values:
            values["loss"] = values.pop("critic_loss")
            values["grad_norm"] = values.pop("critic_grad_norm")
        values |= self._speed(step, updates)
        self.health.check_metrics(step, values)
        self.log(step, values)

    def log(self, step: int, values: dict[str, Any]) -> None:
        named = [name for name in FIGURES if name in values] or [*values]
        log.info("step %d  %s", step, "  ".join(_text(name, values[name]) for name in named))
        self.trackers.log(step, values)
        self.newest |= as_json(values)

    def _episodes(self) -> dict[str, float]:
        if not self.episodes:
            return {}
        steps = sum(episode.steps for episode in self.episodes)
        return {
            "episodes": self.episodes[-1].number + 1,
            "success_rate": float(np.mean([episode.success for episode in self.episodes])),
            "return": float(np.mean([episode.return_ for episode in self.episodes])),
            "episode_steps": steps / len(self.episodes),
            "intervention_rate": sum(episode.interventions for episode in self.episodes) / max(steps, 1),
        }

    def _speed(self, step: int, updates: int) -> dict[str, float]:
        now = time.perf_counter()
        elapsed, (step_before, updates_before) = max(now - self.since, 1e-9), self.counted
        self.since, self.counted = now, (step, updates)
        per_second = (step - step_before) / elapsed
        learned = updates - updates_before
        return {
            "transitions_per_s": per_second,
            "step_s": elapsed / max(step - step_before, 1),
            "updates_per_s": learned / elapsed,
            "samples_per_s": learned * self.batch_size / elapsed,
            "left_s": (self.steps - step) / per_second if per_second else 0.0,
        }


def _text(name: str, value: Any) -> str:
    label = FIGURES.get(name, name)
    return f"{label} {100 * value:.0f} %" if name in SHARES else f"{label} {value:.4g}"
