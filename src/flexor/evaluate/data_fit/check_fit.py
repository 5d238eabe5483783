"""`flexor data check --policy.path`, also called at the start of fine-tuning: does this data fit that policy?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from flexor.core.batch import ACTION, STATE
from flexor.core.errors import FlexorError
from flexor.core.findings import ERROR, Finding, Fix
from flexor.core.log import log
from flexor.data.check.action_kind import ABSOLUTE
from flexor.data.check.summary import DataSummary, summarise_data, swapped_looks
from flexor.data.dataset import Dataset
from flexor.data.mixture.mixed import without_padding
from flexor.evaluate.data_fit.joints import JointRanges, joint_findings, order_by_names, outside_findings
from flexor.evaluate.data_fit.trained_on import TrainedOn, read_trained_on
from flexor.policies.rename import in_dataset

DIFFERENT_LOOK = 12.0  # levels by which the pictures of cameras differ that are not the same
CROSSED = 0.5  # of the difference that is left if two cameras are swapped
SAME_RATE = 0.1
ROWS = 50_000
LISTED = 3


@dataclass(frozen=True)
class DataFit:
    """Findings about data and policy, and by how much larger values are than in training."""

    findings: list[Finding]
    sizes: list[float]
    """For each value of the state, or of the action if there is no state; 1 if it is not known."""


def check_fit(
    dataset: Dataset, trained: TrainedOn, rename_map: Mapping[str, str] | None = None, new_tasks: bool = False
) -> DataFit:
    """`rename_map`: the dataset's names and the policy's. With `new_tasks`, tasks need not be those of the training."""
    names = dict(zip(in_dataset(trained.config.observed, rename_map or {}), trained.config.observed))
    present = {name: target for name, target in names.items() if name in dataset.features}
    here = summarise_data(dataset, present)
    findings = [*_missing(dataset, names), *_swapped(here, trained)]
    joints, sizes = _joints(dataset, here, trained, present)
    kinds = _kind(here, trained)
    findings += [*joints, *kinds, *_rate(here, trained), *_tasks(here, trained, new_tasks)]
    causes = [finding for finding in findings if finding.is_cause]
    if not causes:
        findings += _outside(dataset, here, trained, present)
    return DataFit(findings, sizes)


def findings_before_tuning(path: str, dataset: Dataset, rename_map: Mapping[str, str]) -> list[Finding]:
    """For a run that starts from the policy at `path`: new tasks are what it is for."""
    try:
        return check_fit(dataset, read_trained_on(path), rename_map, new_tasks=True).findings
    except (FlexorError, OSError) as error:
        log.info("the data was not compared with that of %s: %s", path, error)
        return []


def _missing(dataset: Dataset, names: Mapping[str, str]) -> list[Finding]:
    missing = [target for name, target in names.items() if name not in dataset.features]
    if not missing:
        return []
    spare = [camera for camera in dataset.cameras if camera not in names]
    example = f"--rename_map='{{{spare[0] if spare else 'NAME'}: {missing[0]}}}'"
    evidence = f"the policy was trained with {', '.join(missing)}, which the dataset does not have"
    evidence += f"; it has {', '.join(spare)} instead" if spare else ""
    return [Finding("input missing", evidence, [Fix(f"if it has another name here, give {example}")], ERROR)]


def _swapped(here: DataSummary, trained: TrainedOn) -> list[Finding]:
    """Two cameras that look like each other's in training."""
    for pair in combinations(here.cameras, 2):
        looks = swapped_looks(here.cameras, trained.cameras, pair)
        if looks is None:
            continue
        straight, crossed = looks
        if straight > 2 * DIFFERENT_LOOK and crossed < CROSSED * straight:
            first, second = pair
            evidence = (
                f"{first} and {second} look swapped: their pictures differ from those in training by "
                f"{straight / 2:.0f} levels of 255, and by {crossed / 2:.0f} if they are swapped"
            )
            names = f"{{{first}: {second}, {second}: {first}}}"
            fix = f"look at them with `flexor data show`; if it is so, give --rename_map='{names}'"
            return [Finding("cameras swapped", evidence, [Fix(fix)], is_cause=True)]
    return []


def _joints(
    dataset: Dataset, here: DataSummary, trained: TrainedOn, present: Mapping[str, str]
) -> tuple[list[Finding], list[float]]:
    findings: list[Finding] = []
    sizes: list[float] = []
    episodes = min(len(dataset.episodes), sum(trained.tasks.values()) or len(dataset.episodes))
    for name in _compared(trained):
        values, before = here.values.get(name), trained.values.get(name)
        if values is None or before is None:
            continue
        findings += order_by_names(name, values.names, before.names)
        ranges = JointRanges.of(values, before)
        if ranges is None:
            continue
        if name == STATE:
            findings += _still(ranges)
        if name == STATE or _same_kind(here, trained):
            findings += joint_findings(name, ranges, episodes)
            sizes = sizes or np.nan_to_num(ranges.sizes(), nan=1.0).tolist()
    unique: dict[tuple[str, str], Finding] = {}
    for finding in findings:  # of state and action alike
        unique.setdefault((finding.name, finding.evidence.partition(" of ")[0]), finding)
    return [*unique.values()], sizes


def _compared(trained: TrainedOn) -> list[str]:
    """The features whose values are compared: the policy's own."""
    return [STATE, ACTION] if STATE in trained.config.observed else [ACTION]


def _still(ranges: JointRanges) -> list[Finding]:
    """A state that never changes here, and did in training."""
    moved = np.isfinite(ranges.span)
    still = moved & (ranges.high <= ranges.low)
    if not moved.any() or still.sum() < moved.sum():
        return []
    fix = "check the robot's sensors: the state was not recorded. The policy expects one that changes"
    return [
        Finding(
            "state constant", "the state never changes here, and did in training", [Fix(fix)], is_cause=True
        )
    ]


def _same_kind(here: DataSummary, trained: TrainedOn) -> bool:
    kinds = (here.action_kind, trained.action_kind)
    return None in kinds or (kinds[0] == ABSOLUTE) == (kinds[1] == ABSOLUTE)


def _kind(here: DataSummary, trained: TrainedOn) -> list[Finding]:
    if _same_kind(here, trained):
        return []
    evidence = f"the actions are {here.action_kind} here, and were {trained.action_kind} in training"
    fix = "convert the actions, or train a new policy: this one would move the robot to wrong places"
    return [Finding("action kind", evidence, [Fix(fix)], is_cause=True)]


def _rate(here: DataSummary, trained: TrainedOn) -> list[Finding]:
    if trained.fps is None or abs(here.fps / trained.fps - 1) <= SAME_RATE:
        return []
    evidence = f"the data has {here.fps:g} frames per second, the training data had {trained.fps:g}"
    fix = "record at the rate of the training, or train at that of the data: a chunk would take another time"
    return [Finding("other frame rate", evidence, [Fix(fix)], is_cause=True)]


def _tasks(here: DataSummary, trained: TrainedOn, new_tasks: bool) -> list[Finding]:
    tasks = [task for task in here.tasks if task]
    findings: list[Finding] = []
    if trained.reads_words and trained.tasks and not new_tasks:
        unseen = [task for task in tasks if _plain(task) not in {_plain(other) for other in trained.tasks}]
        if unseen:
            evidence = (
                f"the policy was not trained on {_quoted(unseen)}; it was on {_quoted([*trained.tasks])}"
            )
            fix = "use the words of the training, correct them with `flexor data tasks`, or train on this task too"
            findings.append(Finding("task unseen", evidence, [Fix(fix)], is_cause=True))
    if len(tasks) > 1:
        alike = [tasks] if not trained.reads_words else _same_tokens(tasks, trained)
        for group in alike[:LISTED]:
            why = "it reads no words" if not trained.reads_words else "they have the same tokens"
            evidence = f"the policy can't tell {_quoted(group)} apart: {why}"
            fix = (
                "if they need different actions, train a policy that reads words, or one for each task"
                if not trained.reads_words
                else "use words that differ earlier, or a larger policy.tokenizer_max_length"
            )
            findings.append(Finding("tasks alike", evidence, [Fix(fix)]))
    return findings


def _same_tokens(tasks: list[str], trained: TrainedOn) -> list[list[str]]:
    if trained.tokens is None:
        return []
    groups: dict[tuple[int, ...], list[str]] = {}
    for task, tokens in zip(tasks, trained.tokens(tasks)):
        groups.setdefault(tokens, []).append(task)
    return [group for group in groups.values() if len(group) > 1]


def _outside(
    dataset: Dataset, here: DataSummary, trained: TrainedOn, present: Mapping[str, str]
) -> list[Finding]:
    dataset_names = {target: name for name, target in present.items()}
    findings: list[Finding] = []
    for name in _compared(trained):
        values, before = here.values.get(name), trained.values.get(name)
        ranges = JointRanges.of(values, before) if values and before else None
        if ranges is not None:
            rows = without_padding(dataset, dataset_names.get(name, name)).reshape(len(dataset), -1)
            findings += outside_findings(name, ranges, rows[:: -(-len(rows) // ROWS)].astype(np.float64))
    return findings


def _plain(task: str) -> str:
    return " ".join(task.lower().split()).rstrip(".!")


def _quoted(texts: list[str]) -> str:
    return ", ".join(map(repr, texts[:LISTED])) + (
        f" and {len(texts) - LISTED} more" if len(texts) > LISTED else ""
    )
