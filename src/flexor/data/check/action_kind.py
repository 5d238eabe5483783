"""What actions mean: where joints shall go (absolute), how far (relative), or how fast (velocity). Told from the data.

An absolute action is close to the state that follows it. A relative one is close to the change of the state that
follows, a velocity is proportional to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ABSOLUTE, RELATIVE, VELOCITY = "absolute", "relative", "velocity"
DELAYS = (1, 2, 3, 5, 8)  # frames after which a robot may have followed its action
MOVES = 1e-6  # of the largest value: a joint whose state changes less rests
ALIKE = 0.5  # the least share of a joint's variance that a kind explains
CLEAR = 0.2  # by which it must explain more than the other kind
ENOUGH = 0.25  # the least share that changes explain where states explain nothing: robots follow with errors
VELOCITY_SLOPE = (
    3.0  # an action that is so many times the change to the next frame is a velocity, such as per second
)
ROWS = 20_000


@dataclass(frozen=True)
class ActionKind:
    """The kind of most joints, and how well it explains them."""

    name: str
    explained: float


def find_action_kind(
    actions: np.ndarray, states: np.ndarray, starts: np.ndarray, pairs: Sequence[int | None]
) -> ActionKind | None:
    """None if the data does not say. `actions` [N, A], `states` [N, S] of episodes that begin at `starts` [E]; `pairs`
    are the state's values that measure the same joints as the actions."""
    ends = np.append(starts[1:], len(actions))
    delays = [delay for delay in DELAYS if (ends - starts).max() > delay + 1]
    votes: list[ActionKind] = []
    for joint, value in enumerate(pairs):
        if value is not None and delays:
            votes += _kind_of_joint(actions[:, joint], states[:, value], ends, delays)
    if not votes:
        return None
    names = [vote.name for vote in votes]
    most = max(dict.fromkeys(names), key=names.count)
    if names.count(most) <= len(names) / 2:
        return None
    return ActionKind(most, float(np.mean([vote.explained for vote in votes if vote.name == most])))


def _kind_of_joint(
    action: np.ndarray, state: np.ndarray, ends: np.ndarray, delays: Sequence[int]
) -> list[ActionKind]:
    absolute, changing, slope = -np.inf, 0.0, 1.0
    for delay in delays:
        rows = _rows_before_end(ends, len(action), delay)
        a, now, then = (
            values.astype(np.float64) for values in (action[rows], state[rows], state[rows + delay])
        )
        finite = np.isfinite(a) & np.isfinite(now) & np.isfinite(then)
        a, change, then = a[finite], (then - now)[finite], then[finite]
        if len(a) < 3 or np.std(change) <= MOVES * max(float(np.abs(then).max()), 1e-3) or np.std(a) == 0:
            continue
        absolute = max(absolute, 1 - float(np.mean((a - then) ** 2)) / float(np.var(a)))
        gain = float(np.sum(a * change)) / float(np.sum(change**2))
        if gain > 0:
            changing = max(changing, 1 - float(np.sum((a - gain * change) ** 2)) / float(np.sum(a**2)))
        if delay == 1:
            slope = gain
    if absolute >= ALIKE and absolute > changing + CLEAR:
        return [ActionKind(ABSOLUTE, absolute)]
    if changing >= (ALIKE if absolute > 0 else ENOUGH) and changing > absolute + CLEAR:
        return [ActionKind(VELOCITY if slope > VELOCITY_SLOPE else RELATIVE, changing)]
    return []


def _rows_before_end(ends: np.ndarray, count: int, delay: int) -> np.ndarray:
    """Rows whose episode goes on for `delay` frames, some of them if there are many."""
    rows = np.arange(count)
    inside = rows + delay < ends[np.searchsorted(ends, rows, side="right")]
    rows = rows[inside]
    return rows[:: -(-len(rows) // ROWS)]
