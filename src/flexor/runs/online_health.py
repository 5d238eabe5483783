"""Faults of a run that learns while it acts, found in its metrics: values, exploration, rewards and help.

Each rule needs several lines in a row, because the figures of few episodes vary. It reports a fault once, when it
begins.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from flexor.core.findings import Finding, Fix
from flexor.runs.text import figure

Line = Mapping[str, Any]

LINES = 10  # in a row, before a rule reports
EPISODES = 50  # before anything is said about what happens in them
GAP = 0.5  # of the value: by so much it is above the returns
LEAST_GAP = 0.25  # of the largest value or return so far
COLLAPSED, RANDOM = 3.0, 1.5  # entropy below and above its target
SUCCEEDS = 0.8  # a policy that succeeds this often need not explore
HELP_LEAST, HELP_FALLS = 0.2, 0.9  # share of steps; of the share in the first lines


class OnlineHealth:
    """All rules. `update` takes the lines of `metrics.jsonl` in turn and returns the findings that begin with each."""

    def __init__(self, config: Mapping[str, Any]):
        checks = (_Overestimation(), _Collapse(), _Randomness(), _NoRewards(config), _Help())
        self._rules = [_Persistent(check) for check in checks]

    def update(self, line: Line) -> list[Finding]:
        return [finding for rule in self._rules if (finding := rule.update(line)) is not None]


class _Persistent:
    """A check that must find the same in several lines in a row. It is armed again when it finds nothing."""

    def __init__(self, check: Callable[[Line], Finding | None]):
        self.check, self.count = check, 0

    def update(self, line: Line) -> Finding | None:
        finding = self.check(line)
        self.count = 0 if finding is None else self.count + 1
        return finding if self.count == LINES else None


def _numbers(line: Line, *names: str) -> list[float] | None:
    """The values of these names; None if one of them is missing."""
    values = [number(line.get(name)) for name in names]
    present = [value for value in values if value is not None]
    return present if len(present) == len(names) else None


class _Overestimation:
    """Critics that promise more than the episodes bring."""

    def __init__(self) -> None:
        self.scale = 0.0

    def __call__(self, line: Line) -> Finding | None:
        values = _numbers(line, "first_q", "discounted_return", "episodes")
        if values is None:
            return None
        value, received, episodes = values
        self.scale = max(self.scale, abs(value), abs(received))
        gap = value - received
        if episodes < EPISODES or gap <= max(GAP * abs(value), LEAST_GAP * self.scale):
            return None
        evidence = (
            f"at the beginning of episodes they expect a discounted return of {figure(value)}, and it was "
            f"{figure(received)} in the last episodes, for {LINES} log lines"
        )
        return Finding(
            "critics overestimate",
            evidence,
            [
                Fix(
                    "if it does not shrink by itself: use more critics (--rl.num_critics=10 "
                    "--rl.num_subsample_critics=2), fewer updates (--rl.updates, --rl.utd_ratio) or a lower "
                    "--rl.critic_lr; check that the environment ends an episode that failed"
                )
            ],
        )


class _Collapse:
    """A policy that acts the same all the time, before it succeeds."""

    def __call__(self, line: Line) -> Finding | None:
        values = _numbers(line, "entropy", "target_entropy")
        if values is None or (number(line.get("success_rate")) or 0.0) >= SUCCEEDS:
            return None
        entropy, target = values
        if entropy >= target - COLLAPSED:
            return None
        return Finding(
            "the policy stopped exploring",
            f"the entropy of its actions is {figure(entropy)}, far below its target {figure(target)}, for {LINES} "
            "log lines",
            [Fix("raise --rl.temperature_lr, so that the temperature follows, or --rl.temperature_init")],
        )


class _Randomness:
    """A policy that acts at random although it should know better by now."""

    def __call__(self, line: Line) -> Finding | None:
        values = _numbers(line, "entropy", "target_entropy", "episodes", "success_rate")
        if values is None:
            return None
        entropy, target, episodes, success = values
        if episodes < 2 * EPISODES or success >= SUCCEEDS / 2 or entropy <= target + RANDOM:
            return None
        temperature = number(line.get("temperature"))
        now = "" if temperature is None else f" (the temperature is {figure(temperature)} now)"
        return Finding(
            "the policy acts too much at random",
            f"the entropy of its actions is {figure(entropy)}, far above its target {figure(target)}, for {LINES} "
            f"log lines, and {percent(success)} of the last episodes succeeded",
            [Fix(f"raise --rl.temperature_lr or lower --rl.temperature_init{now}, or make rewards larger")],
        )


class _NoRewards:
    """Neither demonstrations nor a success: there is nothing to learn from."""

    def __init__(self, config: Mapping[str, Any]):
        data = config.get("dataset")
        names = ("repo_id", "root", "mix")
        self.demonstrated = isinstance(data, Mapping) and any(data.get(name) is not None for name in names)
        self.rewarded = False

    def __call__(self, line: Line) -> Finding | None:
        values = _numbers(line, "return", "episodes")
        if values is None:
            return None
        received, episodes = values
        self.rewarded |= received != 0 or bool(number(line.get("success_rate")))
        if self.demonstrated or self.rewarded or episodes < EPISODES:
            return None
        return Finding(
            "no rewards to learn from",
            f"none of {episodes:.0f} episodes had a reward, and there are no demonstrations",
            [
                Fix(
                    "record demonstrations and give them with --dataset.root and --rl.reward, take over with "
                    "--rl.intervener, or have the environment give rewards on the way"
                )
            ],
        )


class _Help:
    """Somebody helps as much as at the beginning."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.newest: deque[float] = deque(maxlen=LINES)

    def __call__(self, line: Line) -> Finding | None:
        values = _numbers(line, "intervention_rate", "episodes")
        if values is None:
            return None
        rate, episodes = values
        if len(self.first) < LINES:
            self.first.append(rate)
        self.newest.append(rate)
        before, now = sum(self.first) / len(self.first), sum(self.newest) / len(self.newest)
        if episodes < 4 * EPISODES or now < HELP_LEAST or now < HELP_FALLS * before:
            return None
        return Finding(
            "help is not falling",
            f"somebody acts in {percent(now)} of the steps, as in the first lines ({percent(before)}), after "
            f"{episodes:.0f} episodes",
            [
                Fix(
                    "look whether the policy sees what it needs (`flexor report`), learn more from each step "
                    "(--rl.updates=4), and help only where it fails"
                )
            ],
        )


def number(value: object) -> float | None:
    """A finite number; None for all that a stranger's line may have instead."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None  # type: ignore[arg-type]


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
