"""`flexor eval --open_loop`: what a policy predicts beside what was recorded, and what that says about both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flexor.core.batch import ACTION
from flexor.core.console import Progress, table
from flexor.core.findings import Finding
from flexor.data.dataset import Dataset
from flexor.evaluate.open_loop.baselines import HOLD, MEAN, REPEAT, action_kind, predict_baselines
from flexor.evaluate.open_loop.errors import ErrorChange, Target, compare, scale_of
from flexor.evaluate.open_loop.hypotheses import (
    Hypothesis,
    camera_hypotheses,
    joint_hypotheses,
    kind_hypotheses,
    rate_hypotheses,
    unit_hypotheses,
)
from flexor.evaluate.open_loop.inputs import STATE_INPUT, InputUse, measure_inputs
from flexor.evaluate.open_loop.predict import ChunkPredictor, Predict
from flexor.evaluate.open_loop.samples import Samples, read_samples
from flexor.evaluate.open_loop.search import Explanation, Search, doubtful_joints
from flexor.evaluate.open_loop.verdicts import (
    baseline_findings,
    blank_cameras,
    blank_findings,
    explanation_findings,
    input_findings,
    order_findings,
    word_findings,
)
from flexor.evaluate.open_loop.words import WordFit, fit_words
from flexor.policies.pretrained import Pretrained
from flexor.policies.processing.rename_and_move import renaming_of
from flexor.runs.text import figure

SAMPLES = 200
TRIED = ("cameras swapped", "sign flipped", "joints permuted", "other units")
"""Faults that predictions tell more surely than statistics of the data."""


@dataclass(frozen=True)
class DataEvidence:
    """What is known about the data without predictions."""

    findings: Sequence[Finding] = ()
    tasks: Sequence[str] = ()
    """Those that the policy was trained on; empty if that is not known."""
    sizes: Sequence[float] = ()
    """For each value of the state, how many times larger it is than in the policy's training; empty if not known."""


NO_EVIDENCE = DataEvidence()


@dataclass(frozen=True, eq=False)
class OpenLoop:
    """The result. Errors are in the robot's units, scores in standard deviations of the actions."""

    samples: Samples
    target: Target
    predicted: np.ndarray  # [N, H, A]
    baselines: dict[str, np.ndarray]
    changes: dict[str, ErrorChange]
    """Of the policy's error, compared with each baseline."""
    use: InputUse
    words: WordFit | None
    explanations: list[Explanation]
    findings: list[Finding] = field(default_factory=list)
    dataset: Dataset | None = None
    action_kind: str | None = None

    @property
    def name(self) -> str:
        return "" if self.dataset is None else self.dataset.repo_id

    @property
    def score(self) -> float:
        return self.target.score(self.predicted)

    @property
    def beats_all(self) -> bool:
        return all(change.falls for change in self.changes.values())


def run_open_loop(
    pretrained: Pretrained,
    dataset: Dataset,
    *,
    reference: Dataset | None = None,
    evidence: DataEvidence = NO_EVIDENCE,
    count: int = SAMPLES,
    seed: int = 0,
    inputs: bool = True,
    progress: Progress | None = None,
) -> OpenLoop:
    """Compare the policy's predictions with the actions of the dataset's episodes.

    `reference` has the episodes that means and scales are computed of, by default the same. Without `inputs`, only
    predictions and baselines are compared.
    """
    config, reference = pretrained.policy.config, reference or dataset
    horizon = sum(step >= 0 for step in config.action_deltas)
    samples = read_samples(dataset, config, renaming_of(pretrained.preprocessor), horizon, count)
    predictor = ChunkPredictor(pretrained, samples, seed)
    predicted = predictor()
    samples = shortened(samples, predicted.shape[1])
    actions = reference.columns[ACTION].reshape(len(reference), -1)
    target = Target(samples.actions, samples.valid, scale_of(actions))
    kind = action_kind(reference, samples)
    baselines = predict_baselines(reference, samples, kind)
    result = judge(samples, target, predictor, predicted, baselines, evidence, inputs, progress)
    return replace(result, dataset=dataset, action_kind=None if kind is None else kind.name)


def judge(
    samples: Samples,
    target: Target,
    predictor: Predict,
    predicted: np.ndarray,
    baselines: dict[str, np.ndarray],
    evidence: DataEvidence = NO_EVIDENCE,
    inputs: bool = True,
    progress: Progress | None = None,
) -> OpenLoop:
    """Compare predictions with baselines, find out what the policy looks at, and which faults the data has."""
    scores = target.sample_scores(predicted)
    changes = {
        name: compare(target.sample_scores(actions), scores, samples.episode)
        for name, actions in baselines.items()
    }
    use, words, explanations = InputUse([], 0.0), None, []
    if inputs:
        use = measure_inputs(samples, target, predictor, predicted)
        rivals = [baselines[name] for name in (HOLD, MEAN) if name in baselines]
        words = fit_words(samples, target, predictor, predicted, [*evidence.tasks], rivals)
        search = Search(samples, target, predictor, predicted, rivals)
        explanations = search.run(
            _hypotheses(samples, evidence.sizes, doubtful_joints(target, predicted, rivals)), progress
        )
    result = OpenLoop(samples, target, predicted, baselines, changes, use, words, explanations)
    return replace(result, findings=_findings(result, evidence.findings))


def shortened(samples: Samples, horizon: int) -> Samples:
    """With as many actions as the policy predicts."""
    return replace(samples, actions=samples.actions[:, :horizon], valid=samples.valid[:, :horizon])


def _hypotheses(samples: Samples, sizes: Sequence[float], joints: Sequence[int]) -> list[Hypothesis]:
    return [
        *camera_hypotheses(samples),
        *unit_hypotheses(samples, _sizes_of_joints(samples, sizes)),
        *kind_hypotheses(samples),
        *rate_hypotheses(samples.actions.shape[1]),
        *joint_hypotheses(samples, joints),
    ]


def _sizes_of_joints(samples: Samples, sizes: Sequence[float]) -> list[float]:
    """By joint; 1 where it is not known."""
    return [
        sizes[value] if value is not None and value < len(sizes) else 1.0 for value in samples.state_of_joint
    ]


def _findings(result: OpenLoop, checks: Sequence[Finding]) -> list[Finding]:
    samples = result.samples
    blank = blank_cameras(samples)
    explained = explanation_findings(result.explanations)
    named = {finding.name for finding in explained}
    confirmed = [finding for finding in checks if finding.name not in {*named, *TRIED}]
    still = [STATE_INPUT] if _is_still(samples) else []
    scores = {
        name: (result.target.score(actions), result.changes[name])
        for name, actions in result.baselines.items()
    }
    return order_findings(
        [
            *blank_findings(blank),
            *explained,
            *word_findings(result.words),
            *confirmed,
            *input_findings(samples, result.use, [*blank, *still]),
            *baseline_findings(result.score, scores, REPEAT),
        ]
    )


def _is_still(samples: Samples) -> bool:
    """Whether the state is the same in all samples."""
    return samples.state is not None and not bool(scale_of(samples.state).any())


def as_json(result: OpenLoop) -> dict[str, Any]:
    """All figures, as plain values."""
    target, samples = result.target, result.samples
    return {
        "dataset": result.name,
        "episodes": sorted({int(episode) for episode in samples.episode}),
        "samples": len(samples),
        "steps": int(samples.actions.shape[1]),
        "joints": samples.joints,
        "action_kind": result.action_kind,
        "score": result.score,
        "beats_all_baselines": result.beats_all,
        "errors": _errors(target, result.predicted),
        "baselines": {
            name: {
                "score": target.score(actions),
                "change": _change(result.changes[name]),
                **_errors(target, actions),
            }
            for name, actions in result.baselines.items()
        },
        "inputs": [
            {
                "input": part.input,
                "way": part.way,
                "moved": part.moved,
                "score": part.score,
                "change": _change(part.change),
            }
            for part in result.use.replacements
        ],
        "ignored": result.use.ignored,
        "verdicts": [_verdict(finding) for finding in result.findings],
    }


def _errors(target: Target, actions: np.ndarray) -> dict[str, Any]:
    return {"joint": target.joint_errors(actions).tolist(), "step": target.step_errors(actions).tolist()}


def _change(change: ErrorChange) -> dict[str, float]:
    return {"mean": change.mean, "low": change.low, "high": change.high}


def _verdict(finding: Finding) -> Mapping[str, Any]:
    return {
        "kind": finding.name.replace(" ", "-"),
        "message": finding.evidence,
        "fix": finding.fix,
        "is_cause": finding.is_cause,
    }


def render(result: OpenLoop) -> str:
    """What a terminal shows."""
    target, samples = result.target, result.samples
    count = len({*samples.episode.tolist()})
    joints = [*result.samples.joints]
    rows: list[list[str]] = [["", "error", "change", *joints]]
    rows.append(["policy", figure(result.score), "", *map(figure, target.joint_errors(result.predicted))])
    for name, actions in result.baselines.items():
        change = f"{100 * result.changes[name].mean:+.0f} %"
        rows.append([name, figure(target.score(actions)), change, *map(figure, target.joint_errors(actions))])
    lines = [
        f"{result.name}: {len(samples)} samples of {count} episodes, {samples.actions.shape[1]} steps each",
        table(rows),
        "error: in standard deviations of the actions; of joints: in the robot's units; change: by the policy",
    ]
    if result.use.replacements:
        lines += ["", _input_table(result)]
    lines += [
        "",
        "The policy beats all baselines." if result.beats_all else "The policy does not beat all baselines.",
    ]
    for finding in result.findings:
        lines += [f"  {finding.name.upper()}: {finding.evidence}", f"    -> {finding.fix}"]
    return "\n".join(lines if result.findings else [*lines, "No fault found."])


def _input_table(result: OpenLoop) -> str:
    rows = [["input", "replaced by", "predictions move", "error", "change"]]
    for part in result.use.replacements:
        change = f"{100 * part.change.mean:+.0f} %"
        ignored = " (ignored)" if part.input in result.use.ignored else ""
        rows.append([part.input + ignored, part.way, figure(part.moved), figure(part.score), change])
    return table(rows)
