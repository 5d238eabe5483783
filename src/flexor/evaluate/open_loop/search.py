"""Finds which hypotheses about the data explain a policy's error: those that lower it, the strongest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexor.core.console import Progress
from flexor.evaluate.open_loop.errors import ErrorChange, Target, compare
from flexor.evaluate.open_loop.hypotheses import Hypothesis
from flexor.evaluate.open_loop.predict import Predict
from flexor.evaluate.open_loop.samples import Observation, Samples

TRIED = 64  # samples that each hypothesis is tried on
FEWEST = 12  # samples: of fewer, nothing is concluded
FALLS = 0.2  # the least share by which the error must fall
JOINT_FALLS = 0.35  # the same of the joints concerned, where a hypothesis concerns some
MOST = 3  # faults at once
DOUBTFUL = 0.5  # a joint's error, in that of the best baseline, from which its data may be wrong
MOST_JOINTS = 10  # of which signs and order are tried


@dataclass(frozen=True)
class Explanation:
    """A hypothesis that lowers the error, together with those before it."""

    hypothesis: Hypothesis
    change: ErrorChange
    """Of the error of the joints that it concerns."""
    total: ErrorChange
    """Of the error of all joints."""
    beats_baselines: bool


@dataclass(frozen=True, eq=False)
class Search:
    """Tries hypotheses on some of the samples."""

    samples: Samples
    target: Target
    predictor: Predict
    predicted: np.ndarray  # [N, H, A] for the recorded inputs
    baselines: Sequence[np.ndarray]
    """What a true hypothesis must beat: [N, H, A] each."""

    @property
    def places(self) -> np.ndarray:
        count = len(self.samples)
        return np.unique(np.linspace(0, count - 1, min(count, TRIED)).round().astype(int))

    def run(self, hypotheses: Sequence[Hypothesis], progress: Progress | None = None) -> list[Explanation]:
        """The explanations, the one that lowers the error most first."""
        explanations: list[Explanation] = []
        remaining = list(hypotheses) if len(self.places) >= FEWEST else []
        while remaining and len(explanations) < MOST:
            base = self._predict([entry.hypothesis for entry in explanations])
            tried: list[Explanation] = []
            for number, hypothesis in enumerate(remaining):
                tried.append(self._try(hypothesis, explanations, base))
                if progress is not None and not explanations:
                    progress(number + 1, len(remaining))
            good = [entry for entry in tried if is_explained(entry)]
            if not good:
                break
            explanations.append(min(good, key=lambda entry: entry.total.mean))
            remaining = [entry.hypothesis for entry in good if _differs(entry, explanations[-1])]
        return explanations

    def _try(self, hypothesis: Hypothesis, before: Sequence[Explanation], base: np.ndarray) -> Explanation:
        after = self._predict([*(entry.hypothesis for entry in before), hypothesis])
        places, joints = self.places, hypothesis.joints
        steps = np.array(hypothesis.steps or range(base.shape[1]))
        target, episode = self.target.part(places, steps), self.samples.episode[places]
        all_joints, of_joints = (
            [target.sample_scores(part[:, steps], some) for part in (base, after)] for some in ((), joints)
        )
        total = compare(all_joints[0], all_joints[1], episode)
        change = compare(of_joints[0], of_joints[1], episode)
        rivals = [target.sample_scores(part[places][:, steps], joints) for part in self.baselines]
        beats = all(compare(rival, of_joints[1], episode).falls for rival in rivals)
        return Explanation(hypothesis, change, total, beats)

    def _predict(self, hypotheses: Sequence[Hypothesis]) -> np.ndarray:
        """Predictions as the data would have recorded them, if all the hypotheses are true."""
        places = self.places
        observations: list[Observation] = [self.samples.observation]
        for hypothesis in hypotheses:
            observations.append(hypothesis.observe(observations[-1]))
        changed = observations[-1] is not self.samples.observation
        actions = self.predictor(observations[-1], places=places) if changed else self.predicted[places]
        for hypothesis, observation in zip(reversed(hypotheses), observations[-2::-1]):
            actions = hypothesis.record(
                actions, {name: values[places] for name, values in observation.items()}
            )
        return actions


def doubtful_joints(target: Target, predicted: np.ndarray, baselines: Sequence[np.ndarray]) -> list[int]:
    """The joints that the policy predicts little better than the baselines do, or worse: the worst ones."""
    error = target.joint_errors(predicted)
    least = np.min([target.joint_errors(actions) for actions in baselines], axis=0) if baselines else error
    ratio = np.where(target.scale > 0, error / np.maximum(least, 1e-12), 0.0)
    worst = np.argsort(-ratio, kind="stable")[:MOST_JOINTS]
    return sorted(joint for joint in worst.tolist() if ratio[joint] > DOUBTFUL)


def is_explained(entry: Explanation) -> bool:
    """Whether the error falls clearly, in most episodes."""
    least = JOINT_FALLS if entry.hypothesis.joints else FALLS
    return (
        entry.change.mean < -least
        and entry.change.high < -least / 4
        and entry.total.high < 0
        and entry.beats_baselines
    )


def _differs(entry: Explanation, best: Explanation) -> bool:
    """Whether a hypothesis may be true besides another one."""
    same_fault = entry.hypothesis.fault == best.hypothesis.fault
    joints, taken = {*entry.hypothesis.joints}, {*best.hypothesis.joints}
    if not joints or not taken:
        return not same_fault
    return not joints & taken
