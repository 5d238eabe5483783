"""Policies that predict in parts, as many as it takes: they write word by word, until they have ended.

Only the host can decide to go on, and it waits for the GPU to know. So it asks after each part, not after each word.
Nothing in a part depends on which one it is, and all that it changes stays where it is, so that a part can be captured
in a CUDA graph once and replayed as often as it takes: see `predict_graph.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from flexor.core.batch import Batch
from flexor.core.rng import NoiseSource
from flexor.policies.base import Policy


class StepwisePolicy(Policy):
    """`begin` and `advance` run on the device alone; `ended` and `actions` are what the host does."""

    @property
    @abstractmethod
    def most_parts(self) -> int:
        """The largest number of parts."""

    @abstractmethod
    def begin(self, batch: Batch, noise: NoiseSource) -> Any:
        """Everything that the parts read and change."""

    @abstractmethod
    def advance(self, state: Any) -> None:
        """Compute the next part. It changes the state's tensors in place."""

    @abstractmethod
    def ended(self, state: Any) -> bool:
        """Whether no more parts are needed."""

    @abstractmethod
    def actions(self, state: Any) -> Tensor:
        """A chunk [B, H, A], from the state after the last part."""

    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        return self.actions(self.run(batch, noise))

    def run(self, batch: Batch, noise: NoiseSource) -> Any:
        """The state after the last part."""
        state = self.begin(batch, noise)
        for _ in range(self.most_parts):
            self.advance(state)
            if self.ended(state):
                break
        return state
