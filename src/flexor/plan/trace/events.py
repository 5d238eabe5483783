"""What a trace is: memory that is taken and given back, and the operations of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from flexor.plan.trace.cuda_on_meta import Asked
from flexor.plan.trace.ops import Op

Category = Literal[
    "weights",
    "buffers",
    "casts",
    "gradients",
    "optimizer",
    "ema",
    "batch",
    "activations",
    "workspaces",
    "other",
]


CATEGORIES: tuple[Category, ...] = get_args(Category)
"""`casts` are weights in the lower precision of autocast, which it keeps for the length of a forward pass."""


What = Literal["born", "dies", "scratch"]


class Event(NamedTuple):
    """A piece of memory is taken, given back, or both within one operation."""

    what: What
    storage: int
    nbytes: int
    op: int  # the operation during or before which it happens


@dataclass
class StepEvents:
    """The events of one optimizer step: `start` to `loaded` bring its batches to the GPU, the rest computes."""

    number: int
    start: int
    loaded: int = 0
    end: int = 0


@dataclass(eq=False)
class Trace:
    events: list[Event]
    ops: list[Op]
    category: dict[int, Category]
    built: int
    """Events until here make the policy, once."""
    steps: list[StepEvents]
    """The first step, and if the policy is trained in phases one of the last."""
    batch_size: int
    accumulation: int
    """Passes in a step; all their batches are on the GPU at once."""
    passes: int
    """Passes that the trace holds: after the second they are alike."""
    parameters: int
    trained: int
    units: list[tuple[int, int]]
    """Numbers that each block has which is sharded alone, and those trained; what is left of the policy comes last."""
    gradients: int = 0
    """Bytes that all that is trained has in gradients."""
    attention: dict[tuple, str] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    """Where a step waits for the GPU. Values that it asked for were taken to be zero."""

    def nbytes(self, category: Category) -> int:
        """Bytes asked for in a category that are never given back, such as weights; gradients: of one step."""
        return sum(
            event.nbytes
            for event in self.events
            if event.what == "born" and self.category[event.storage] == category
        )
