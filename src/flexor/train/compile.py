"""torch.compile for the blocks of a policy, in place: names, checkpoints and strategies stay what they are."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from flexor.core.errors import ConfigError
from flexor.policies.base import Policy

SHAPES = 8  # that a block may be compiled for, before torch gives up


def compile_blocks(policy: Policy, device: torch.device) -> None:
    """Each block of the policy, at its first step. What is between blocks, noise above all, stays as it is."""
    import torch._dynamo.config
    import torch._inductor.config

    blocks = policy.shard_units()
    if not blocks:
        raise ConfigError(f"compile=true: {policy.config.type} names no blocks to compile.")
    _check_compiler(device)
    torch._inductor.config.fallback_random = True  # dropout draws what it would draw otherwise
    torch._dynamo.config.recompile_limit = SHAPES * len(blocks)  # torch counts all of them together
    for block in blocks:
        # not block.compile(), which has FSDP's hooks inside, and stops at them
        block.forward = torch.compile(block.forward)


def _check_compiler(device: torch.device) -> None:
    """Before the first step, where it would be hard to read."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise ConfigError(
                "compile=true needs Triton, which comes with torch on Linux: leave it out here."
            )
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            "compile=true on a CPU needs a C++ compiler: install g++, or leave it out."
        ) from error


def not_compiled() -> AbstractContextManager[object]:
    """Blocks as they were written: evaluation has batches of many sizes, each of which would be compiled."""
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
