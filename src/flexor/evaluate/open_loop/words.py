"""Whether each episode's words fit it: the policy's error with them, and with those of the other tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexor.evaluate.open_loop.errors import Target
from flexor.evaluate.open_loop.predict import Predict
from flexor.evaluate.open_loop.samples import Samples

FEWEST = 12  # samples: of fewer, nothing is concluded
MOST_TASKS = 8  # the most frequent ones
FALLS = 0.3  # an episode fits the words of another task if its error falls by this share with them
EPISODES = 0.2  # words are shuffled if they do not fit so large a share of the episodes


@dataclass(frozen=True, eq=False)
class WordFit:
    """Errors of episodes [E, K] with the words of each of K tasks, and with the recorded ones [E]."""

    tasks: list[str]
    episodes: list[int]
    recorded: list[str]
    errors: np.ndarray
    recorded_errors: np.ndarray
    least: float = np.inf
    """The error of the best baseline: words that fit give a smaller one."""

    @property
    def misfits(self) -> dict[int, str]:
        """By episode the words that fit better than the recorded ones."""
        best = self.errors.argmin(1)
        falls = 1 - self.errors.min(1) / np.maximum(self.recorded_errors, 1e-12)
        return {
            episode: self.tasks[best[row]]
            for row, episode in enumerate(self.episodes)
            if falls[row] > FALLS and self.tasks[best[row]] != self.recorded[row]
        }

    @property
    def are_shuffled(self) -> bool:
        enough = len(self.misfits) >= max(2, EPISODES * len(self.episodes))
        return enough and float(self.errors[self._rows].min(1).mean()) < self.least

    @property
    def fall(self) -> float:
        """The share by which the error of these episodes falls with the words that fit."""
        rows = self._rows
        return float(1 - self.errors[rows].min(1).mean() / self.recorded_errors[rows].mean())

    @property
    def _rows(self) -> list[int]:
        return [self.episodes.index(episode) for episode in self.misfits]


def fit_words(
    samples: Samples,
    target: Target,
    predictor: Predict,
    predicted: np.ndarray,
    tasks: list[str],
    rivals: Sequence[np.ndarray] = (),
) -> WordFit | None:
    """`tasks`: those that the policy was trained on, if they are known; `rivals`: baselines [N, H, A].

    None if there are not two tasks to choose from.
    """
    if tasks and not {*samples.task} <= {*tasks}:
        return None  # of words that the policy does not know, none fit
    tasks = [task for task, _ in Counter(samples.task).most_common(MOST_TASKS)]
    if len(tasks) < 2 or len(samples) < FEWEST:
        return None
    episodes, first = np.unique(samples.episode, return_index=True)

    def by_episode(actions: np.ndarray) -> np.ndarray:
        scores = target.sample_scores(actions)
        return np.array([np.nanmean(scores[samples.episode == episode]) for episode in episodes])

    errors = [by_episode(predictor(None, [task] * len(samples))) for task in tasks]
    return WordFit(
        tasks,
        episodes.tolist(),
        [samples.task[place] for place in first.tolist()],
        np.stack(errors, axis=1),
        by_episode(predicted),
        min((target.score(actions) for actions in rivals), default=np.inf),
    )
