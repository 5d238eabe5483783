"""Policies that predict token by token, until an end token.

Only the host can decide to stop, and it waits for the GPU to know. So it asks once per segment of tokens. All segments
run the same operations and change the decode state in place. So one segment is captured in a CUDA graph and replayed as
often as needed: see `predict_graph.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from flexor.core.batch import Batch
from flexor.core.rng import NoiseSource
from flexor.policies.base import Policy


class AutoregressivePolicy(Policy):
    """`prefill` and `decode_segment` run on the device; the host calls `is_finished` and `decode_actions`."""

    @property
    def writes_tokens(self) -> bool:
        """Whether its settings ask for tokens; otherwise it has a `predict` of its own."""
        return True

    @property
    @abstractmethod
    def max_segments(self) -> int:
        """The largest number of segments."""

    @abstractmethod
    def prefill(self, batch: Batch, noise: NoiseSource) -> Any:
        """The decode state before the first token: everything that segments read and change."""

    @abstractmethod
    def decode_segment(self, state: Any) -> None:
        """Decode the tokens of the next segment. Changes the state's tensors in place."""

    @abstractmethod
    def is_finished(self, state: Any) -> bool:
        """Whether every sample has an end token."""

    @abstractmethod
    def decode_actions(self, state: Any) -> Tensor:
        """The chunk [B, H, A] that the state's tokens stand for."""

    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        return self.decode_actions(self.generate(batch, noise))

    def generate(self, batch: Batch, noise: NoiseSource) -> Any:
        """The state after the last segment."""
        state = self.prefill(batch, noise)
        for _ in range(self.max_segments):
            self.decode_segment(state)
            if self.is_finished(state):
                break
        return state
