"""Activation checkpointing saves memory: a block stores only its input, and is recomputed in the backward pass."""

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(block: nn.Module) -> None:
    """Recompute this block. A second call, from the policy's and the run's settings, has no effect."""
    if "forward" not in vars(block):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
