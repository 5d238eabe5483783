"""The learning rate of VQ-BeT: constant while the action vocabulary is trained, then another schedule."""

from __future__ import annotations

from collections.abc import Callable


def after_vocabulary(vocabulary_steps: int, after: Callable[[int], float]) -> Callable[[int], float]:
    """step -> factor of the learning rate; `after` counts its steps from the end of the vocabulary phase."""
    return lambda step: 1.0 if step < vocabulary_steps else after(step - vocabulary_steps)
