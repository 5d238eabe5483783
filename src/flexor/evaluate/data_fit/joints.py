"""Joints of a dataset beside those of a policy's training: order, units, signs, and values outside of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from flexor.core.findings import Finding, Fix
from flexor.data.check.summary import ValueSummary

UNITS = {
    "degrees instead of radians": np.pi / 180,
    "radians instead of degrees": 180 / np.pi,
    "percent instead of fractions": 0.01,
    "fractions instead of percent": 100.0,
    "mm instead of m": 0.001,
    "m instead of mm": 1000.0,
}
"""By what the data has and the policy does not expect: the factor on the data's values that undoes it."""
SIZE = 1.8  # factor by which sizes may differ although units are the same
FAR = 0.7  # distance of two ranges, in the range of training, from which they differ
CLOSE = 0.25  # up to which they agree
ENOUGH_EPISODES = 6
MARGIN = 0.25  # of the range of training, by which values may lie outside
OUTSIDE = 0.3  # of the frames


@dataclass(frozen=True)
class JointRanges:
    """The ranges of the values of a feature here and in training, [D] each."""

    names: list[str]
    low: np.ndarray
    high: np.ndarray
    trained_low: np.ndarray
    trained_high: np.ndarray

    @classmethod
    def of(cls, here: ValueSummary, trained: ValueSummary) -> JointRanges | None:
        """None if they have other numbers of joints."""
        if len(here.low) != len(trained.low):
            return None
        return cls(here.names, *(np.array(part) for part in (here.low, here.high, trained.low, trained.high)))

    @property
    def span(self) -> np.ndarray:
        """Of training; nan for a joint that rested."""
        span = self.trained_high - self.trained_low
        size = np.maximum(np.abs(self.trained_high), np.abs(self.trained_low))
        return np.where(span > 1e-6 * np.maximum(size, 1e-3), span, np.nan)

    def sizes(self) -> np.ndarray:
        """By how much larger the largest values are than in training; nan for joints that rest."""
        here, trained = (
            np.maximum(np.abs(low), np.abs(high))
            for low, high in ((self.low, self.high), (self.trained_low, self.trained_high))
        )
        moves = np.isfinite(self.span) & (self.high > self.low)
        return np.where(moves, here / np.maximum(trained, 1e-12), np.nan)

    def distance(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """How far these ranges [D] are from those of training."""
        result: np.ndarray = (np.abs(low - self.trained_low) + np.abs(high - self.trained_high)) / (
            2 * self.span
        )
        return result


def order_by_names(feature: str, here: Sequence[str], trained: Sequence[str]) -> list[Finding]:
    """The same names in another order."""
    if not here or not trained or [*here] == [*trained] or sorted(here) != sorted(trained):
        return []
    evidence = f"{feature} has the joints {', '.join(here)}, the policy was trained with {', '.join(trained)}"
    return [
        Finding("joints permuted", evidence, [Fix("put them into the order of the training")], is_cause=True)
    ]


def joint_findings(feature: str, ranges: JointRanges, episodes: int) -> list[Finding]:
    """Other units, exchanged joints and opposite signs, as far as the ranges of values tell.

    `episodes`: the smaller number of them, here and in training. Ranges of few may be mirrored by chance.
    """
    if units := _units(feature, ranges):
        return units
    return [*_exchanged(feature, ranges), *_mirrored(feature, ranges)] if episodes >= ENOUGH_EPISODES else []


def _units(feature: str, ranges: JointRanges) -> list[Finding]:
    sizes = ranges.sizes()
    for text, factor in UNITS.items():
        with np.errstate(divide="ignore", invalid="ignore"):
            off = np.abs(np.log(sizes * factor))
        joints = [
            joint
            for joint in np.flatnonzero(off < np.log(SIZE)).tolist()
            if abs(np.log(sizes[joint])) > np.log(5)
        ]
        moving = int(np.isfinite(sizes).sum())
        if len(joints) < max(1, moving / 2) and not _lone_gripper(ranges, joints, factor):
            continue
        names = ", ".join(ranges.names[joint] for joint in joints)
        typical = float(np.median(sizes[joints]))
        ratio = f"{typical:.3g} times as large as" if typical > 1 else f"{1 / typical:.3g} times smaller than"
        evidence = f"{names} of {feature} look like {text}: their values are about {ratio} in training"
        fix = f"multiply them by {factor:.6g}, or train with the units of the data"
        return [Finding("other units", evidence, [Fix(fix)], is_cause=True)]
    return []


def _lone_gripper(ranges: JointRanges, joints: Sequence[int], factor: float) -> bool:
    """Whether the few joints match the ranges of training well in the other unit."""
    if not joints:
        return False
    distance = ranges.distance(ranges.low * factor, ranges.high * factor)[list(joints)]
    return bool((distance < CLOSE).all())


def _exchanged(feature: str, ranges: JointRanges) -> list[Finding]:
    """Pairs of joints whose ranges agree with training only the other way round."""
    straight = ranges.distance(ranges.low, ranges.high)
    for left, right in combinations(range(len(straight)), 2):
        if not (straight[left] > FAR and straight[right] > FAR):
            continue
        order = np.arange(len(straight))
        order[[left, right]] = right, left
        crossed = ranges.distance(ranges.low[order], ranges.high[order])
        if crossed[left] < CLOSE and crossed[right] < CLOSE:
            names = f"{ranges.names[left]} and {ranges.names[right]}"
            evidence = (
                f"{names} of {feature} look exchanged: the range of each is that of the other in training"
            )
            fix = "put the joints into the order of the training"
            return [Finding("joints permuted", evidence, [Fix(fix)], is_cause=True)]
    return []


def _mirrored(feature: str, ranges: JointRanges) -> list[Finding]:
    straight, mirrored = ranges.distance(ranges.low, ranges.high), ranges.distance(-ranges.high, -ranges.low)
    joints = np.flatnonzero((straight > FAR) & (mirrored < CLOSE)).tolist()
    if not joints:
        return []
    names = ", ".join(ranges.names[joint] for joint in joints)
    evidence = (
        f"{names} of {feature} may have the opposite sign: the range of values is that of training, mirrored"
    )
    fix = "check the direction of the joint; if it is the opposite one, multiply its values by -1"
    return [Finding("sign flipped", evidence, [Fix(fix)], is_cause=True)]


def outside_findings(feature: str, ranges: JointRanges, rows: np.ndarray) -> list[Finding]:
    """The share of `rows` [N, D] with values outside of those of training."""
    margin = MARGIN * np.nan_to_num(ranges.span, nan=0.0)
    moves = np.isfinite(ranges.span)
    outside = ((rows < ranges.trained_low - margin) | (rows > ranges.trained_high + margin)) & moves
    share = float(outside.any(1).mean()) if len(rows) else 0.0
    if share < OUTSIDE:
        return []
    worst = np.argsort(-outside.mean(0), kind="stable")[:3]
    parts = [
        f"{ranges.names[j]} ({100 * outside[:, j].mean():.0f} %)"
        for j in worst.tolist()
        if outside[:, j].any()
    ]
    frames = f"in {100 * share:.0f} % of the frames"
    evidence = f"{frames}, values of {feature} are outside of those in training: {', '.join(parts)}"
    fix = "the policy does not know these places: check calibration and units, or train on such data too"
    return [Finding("outside of the training data", evidence, [Fix(fix)])]
