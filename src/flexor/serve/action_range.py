"""The range of a policy's actions in its training data, for robots that refuse what is far outside of it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from flexor.core.batch import ACTION, STATE
from flexor.policies.pretrained import Pretrained
from flexor.policies.processing.normalize import Normalize, Unnormalize
from flexor.policies.processing.pipeline import Pipeline
from flexor.policies.processing.relative_actions import RelativeActions

DEVIATIONS = 3  # around the mean, where a checkpoint has neither extremes nor quantiles


def action_range(pretrained: Pretrained) -> dict[str, list[float]] | None:
    """{"low": [A], "high": [A]} in the robot's units; None if the statistics saved with the policy do not tell."""
    size = pretrained.policy.config.action.shape[0]
    span = _span(_statistics(pretrained.postprocessor, Unnormalize, ACTION))
    if span is None or any(bound.shape != (size,) for bound in span):
        return None
    relative = _relative(pretrained.preprocessor, size)
    if relative.any():  # they are added to the state
        state = _span(_statistics(pretrained.preprocessor, Normalize, STATE))
        if state is None or any(len(bound) < relative.nonzero()[0][-1] + 1 for bound in state):
            return None
        span = tuple(
            bound + np.where(relative, np.resize(of_state, size), 0) for bound, of_state in zip(span, state)
        )
    low, high = span
    if not np.isfinite(span).all() or not (low <= high).all():
        return None
    return {"low": low.tolist(), "high": high.tolist()}


def _statistics(pipeline: Pipeline, kind: type[Normalize | Unnormalize], name: str) -> Mapping[str, Tensor]:
    steps = [step for step in pipeline.steps if isinstance(step, kind) and name in step.stats]
    return steps[0].stats[name] if steps else {}


def _span(statistics: Mapping[str, Tensor]) -> tuple[np.ndarray, ...] | None:
    values = {name: value.detach().cpu().double().numpy() for name, value in statistics.items()}
    for low, high in (("min", "max"), ("q01", "q99")):
        if low in values and high in values:
            return values[low], values[high]
    if "mean" not in values or "std" not in values:
        return None
    return values["mean"] - DEVIATIONS * values["std"], values["mean"] + DEVIATIONS * values["std"]


def _relative(pipeline: Pipeline, size: int) -> np.ndarray:
    """Which parts of an action are predicted relative to the state."""
    steps = [step for step in pipeline.steps if isinstance(step, RelativeActions) and step.enabled]
    return np.array(steps[0].relative(size) if steps else [False] * size)
