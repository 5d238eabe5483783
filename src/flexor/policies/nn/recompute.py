"""Activation checkpointing saves memory: a block stores only its input, and is recomputed in the backward pass.

Dropout must be the same both times. Outside of a CUDA graph, torch stores the state of the random generators in the
forward pass, and restores it to recompute. While a graph is captured there is no state to ask for: a replay gets the
seed and where to begin. So eager steps note where in the generator's numbers each block begins. In a graph, each block
that draws numbers is recomputed with a generator of its own, which is given the seed and this place before each replay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

# Of blocks: in the numbers of the GPU's generator, before and after the forward pass.
Places = list[tuple[int, int]]


def recompute(block: nn.Module) -> None:
    """Recompute this block. A second call, from the policy's and the run's settings, has no effect."""
    if "forward" not in vars(block):
        block.forward = functools.partial(_forward, block.forward)


class BlockDropout:
    """The random numbers of recomputed blocks in a step, in the order of their forward passes."""

    def __init__(self) -> None:
        self.places: Places = []
        self.recomputing: Iterator[torch.Generator | None] | None = None  # while a graph is captured

    def begin_pass(self) -> None:
        """The generator is seeded, and a forward pass begins."""
        self.places = []

    @contextmanager
    def captured(self, generators: list[torch.Generator | None]) -> Iterator[None]:
        """Inside, a forward pass and its backward pass are captured. `generators`: to recompute each block with."""
        self.recomputing = blocks = iter(generators)
        try:
            yield
        finally:
            self.recomputing = None
        if any(True for _ in blocks):
            raise RuntimeError("fewer blocks are recomputed than in the steps before")

    def next_generator(self) -> torch.Generator | None:
        assert self.recomputing is not None
        try:
            return next(self.recomputing)
        except StopIteration:
            raise RuntimeError("more blocks are recomputed than in the steps before") from None


DROPOUT = BlockDropout()


def _forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if DROPOUT.recomputing is not None:
        generator = DROPOUT.next_generator()
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), _drawing_from(generator)),
            **kwargs,
        )
    if not torch.cuda.is_initialized():
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    before = default.get_offset()
    output = checkpoint(forward, *args, use_reentrant=False, **kwargs)
    DROPOUT.places.append((before, default.get_offset()))
    return output


def _drawing_from(generator: torch.Generator | None) -> AbstractContextManager[None]:
    return nullcontext() if generator is None else _swapped(generator)


@contextmanager
def _swapped(generator: torch.Generator) -> Iterator[None]:
    """Inside, torch draws from this generator instead of the GPU's own. A CUDA graph permits it."""
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    state = default.graphsafe_get_state()
    default.graphsafe_set_state(generator)
    try:
        yield
    finally:
        default.graphsafe_set_state(state)
