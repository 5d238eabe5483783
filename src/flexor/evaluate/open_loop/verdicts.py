"""Verdicts: why a policy predicts something else than was recorded, each with its evidence and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flexor.core.findings import Finding, Fix
from flexor.data.check.images import BLANK
from flexor.evaluate.open_loop.errors import ErrorChange
from flexor.evaluate.open_loop.inputs import STATE_INPUT, WORDS, InputUse
from flexor.evaluate.open_loop.samples import Samples
from flexor.evaluate.open_loop.search import Explanation
from flexor.evaluate.open_loop.words import WordFit
from flexor.runs.text import figure

BLANK_SHARE = 0.5  # of the samples: a camera is blank if so many of its images are
LISTED = 3


def explanation_findings(explanations: Sequence[Explanation]) -> list[Finding]:
    """What lowers the error if it is undone."""
    findings = []
    for entry in explanations:
        fall = percent(-entry.change.mean)
        subject = (
            "the error of these joints" if len(entry.hypothesis.joints) > 1 else "the error of this joint"
        )
        subject = subject if entry.hypothesis.joints else "the error"
        evidence = f"{entry.hypothesis.text}: with that undone, {subject} falls by {fall}"
        findings.append(Finding(entry.hypothesis.fault, evidence, [Fix(entry.hypothesis.fix)], is_cause=True))
    return findings


def word_findings(fit: WordFit | None) -> list[Finding]:
    if fit is None or not fit.are_shuffled:
        return []
    misfits = fit.misfits
    recorded = dict(zip(fit.episodes, fit.recorded))
    examples = [
        f"episode {e} is {recorded[e]!r}, but {task!r} fits" for e, task in list(misfits.items())[:LISTED]
    ]
    evidence = (
        f"in {len(misfits)} of {len(fit.episodes)} episodes, the words of another task lower the error, by "
        f"{percent(fit.fall)}: {'; '.join(examples)}"
    )
    fix = "look at these episodes with `flexor data show`, and correct their tasks with `flexor data tasks`"
    return [Finding("words shuffled", evidence, [Fix(fix)], is_cause=True)]


def blank_cameras(samples: Samples) -> list[str]:
    """Cameras that show a single colour in most samples."""
    blank = []
    for camera in samples.colour:
        images = samples.observation[camera]
        images = images.reshape(len(images), -1, *images.shape[-2:])
        span = images.max(axis=(2, 3)).astype(int) - images.min(axis=(2, 3))  # [N, channels]
        if float((span.max(1) <= BLANK).mean()) >= BLANK_SHARE:
            blank.append(camera)
    return blank


def blank_findings(blank: Sequence[str]) -> list[Finding]:
    fix = "look at the camera: it was covered, off or not connected. Leave these episodes out, or record them again"
    return [
        Finding("blank camera", f"{camera} shows a single colour in most frames", [Fix(fix)], is_cause=True)
        for camera in blank
    ]


def input_findings(samples: Samples, use: InputUse, without: Sequence[str]) -> list[Finding]:
    """Inputs that the policy ignores. `without`: those that can't matter here, such as a blank camera."""
    findings = []
    for name in use.ignored:
        if name in without or (name == WORDS and len({*samples.task}) < 2):
            continue
        findings.append(_ignored(name, use))
    return findings


def _ignored(name: str, use: InputUse) -> Finding:
    share = f"{percent(use.strongest(name))} of what all inputs change together"
    if name == WORDS:
        evidence = f"the policy ignores the words: those of another task change its predictions by {share}"
        fix = (
            "if the tasks need different actions, train a policy that reads words (multi_task_dit, smolvla, pi0) on "
            "episodes whose tasks are right, or a policy for each task"
        )
        return Finding("words ignored", evidence, [Fix(fix)])
    if name == STATE_INPUT:
        evidence = f"the policy ignores the state: that of other frames changes its predictions by {share}"
        fix = "check that the state changes in the training data, and that it is what the robot measures"
        return Finding("state ignored", evidence, [Fix(fix)])
    evidence = f"the policy ignores {name}: without it, predictions change by {share}"
    fix = "if the task needs it, check it in the training data; if not, leave it out: the policy gets faster"
    return Finding("camera ignored", evidence, [Fix(fix)])


def baseline_findings(
    policy: float, baselines: Mapping[str, tuple[float, ErrorChange]], repeat: str
) -> list[Finding]:
    """Baselines that are as good as the policy. Repeating the last action must be better: a policy does not know it."""
    better = [
        name
        for name, (_, change) in baselines.items()
        if (change.rises if name == repeat else not change.falls)
    ]
    if not better:
        return []
    scores = ", ".join(f"{name} {figure(baselines[name][0])}" for name in better)
    evidence = (
        f"the policy's error, {figure(policy)} standard deviations of the actions, is no better than that of "
        f"{scores}"
    )
    fix = "train longer, or on more episodes; if the training loss is low, these episodes differ from the training's"
    return [Finding("no better than a baseline", evidence, [Fix(fix)])]


def order_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Causes first; each fault once for each subject; what follows from a cause is left out."""
    causes = [finding for finding in findings if finding.is_cause]
    unique: dict[tuple[str, str], Finding] = {}
    for finding in causes or findings:
        unique.setdefault((finding.name, finding.evidence.partition(":")[0]), finding)
    return list(unique.values())


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
