"""What a policy looks at: how far its predictions change if an input is blanked, shuffled or replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexor.evaluate.open_loop.errors import ErrorChange, Target, compare
from flexor.evaluate.open_loop.predict import Predict
from flexor.evaluate.open_loop.samples import Observation, Samples

WORDS, STATE_INPUT, EVERYTHING = "words", "state", "all inputs"
UNRELATED = "The weather will be fine tomorrow."
IGNORED = (
    0.03  # an input that moves predictions by less than this share of what all inputs move them together
)
USELESS = 0.1  # the same of an input without which the error does not rise
RISES = 0.02  # share from which an error rises


@dataclass(frozen=True)
class Replacement:
    """What a policy predicts if one input is replaced."""

    input: str  # name of the camera, or one of the names above
    way: str  # blanked, shuffled, another task, an unrelated sentence
    moved: float  # how far predictions move, in standard deviations of the actions
    score: float  # error with the replaced input
    change: ErrorChange  # of the error


@dataclass(frozen=True)
class InputUse:
    """All replacements, and which inputs do not matter."""

    replacements: list[Replacement]
    reference: float
    """How far predictions move if all inputs are those of other frames."""

    def strongest(self, name: str) -> float:
        """The share of `reference` by which the input's strongest replacement moves predictions."""
        moved = [part.moved for part in self.replacements if part.input == name]
        return max(moved, default=0.0) / max(self.reference, 1e-12)

    @property
    def ignored(self) -> list[str]:
        names = dict.fromkeys(part.input for part in self.replacements if part.input != EVERYTHING)
        return [
            name
            for name in names
            if self.strongest(name) < (USELESS if self._rise(name) < RISES else IGNORED)
        ]

    def _rise(self, name: str) -> float:
        """The largest share by which the error rises without the input."""
        return max((part.change.mean for part in self.replacements if part.input == name), default=0.0)


def measure_inputs(samples: Samples, target: Target, predictor: Predict, predicted: np.ndarray) -> InputUse:
    """Replace each input in turn. `predicted` [N, H, A] is for the recorded ones."""
    scores = target.sample_scores(predicted)
    places = other_places(samples.episode)
    replacements: list[Replacement] = []

    def replace(
        name: str, way: str, observation: Observation | None, task: Sequence[str] | None = None
    ) -> None:
        result = predictor(observation, task)
        change = compare(scores, target.sample_scores(result), samples.episode)
        moved = target.distance(result, predicted)
        replacements.append(Replacement(name, way, moved, target.score(result), change))

    everything = {name: values[places] for name, values in samples.observation.items()}
    replace(EVERYTHING, "shuffled", everything, [samples.task[place] for place in places])
    for camera in samples.cameras:
        images = samples.observation[camera]
        replace(camera, "blanked", {**samples.observation, camera: blanked(images)})
        replace(camera, "shuffled", {**samples.observation, camera: images[places]})
    for name in samples.observation:
        if name not in samples.cameras:
            label = STATE_INPUT if name == samples.state_name else name
            replace(label, "shuffled", {**samples.observation, name: samples.observation[name][places]})
    if len({*samples.task}) > 1:
        replace(WORDS, "another task", None, other_tasks(samples.task))
    replace(WORDS, "an unrelated sentence", None, [UNRELATED] * len(samples))
    return InputUse(replacements, replacements[0].moved)


def blanked(images: np.ndarray) -> np.ndarray:
    """Every image in its camera's mean colour; a depth map at its mean depth."""
    mean = images.mean(
        axis=tuple(axis for axis in range(images.ndim) if axis != images.ndim - 3), keepdims=True
    )
    return np.broadcast_to(mean.astype(images.dtype), images.shape).copy()


def other_places(episode: np.ndarray) -> np.ndarray:
    """For each sample the place of a sample of another episode, or of another moment if there is only one."""
    count = len(episode)
    order = np.argsort(episode, kind="stable")
    _, sizes = np.unique(episode, return_counts=True)
    shift = int(sizes.max()) if len(sizes) > 1 else max(count // 2, 1)
    places = np.empty(count, int)
    places[order] = np.roll(order, -shift)
    return places


def other_tasks(tasks: Sequence[str]) -> list[str]:
    """The next task of the dataset for each."""
    names = sorted({*tasks})
    following = dict(zip(names, names[1:] + names[:1]))
    return [following[task] for task in tasks]
