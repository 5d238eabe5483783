"""torch.compile for the blocks of a policy, in place. Parameter names, checkpoints and strategies do not change."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from flexor.core.errors import ConfigError
from flexor.policies.base import Policy

SHAPES = 8  # input shapes that a block may be compiled for, before torch gives up


def compile_blocks(policy: Policy, device: torch.device) -> None:
    """Compile each block of the policy, at its first step. Code between blocks, such as noise, is not compiled."""
    import torch._dynamo.config
    import torch._inductor.config

    blocks = policy.shard_units()
    if not blocks:
        raise ConfigError(
            f"compile=true: policy.type={policy.config.type} has no blocks to compile (its shard_units() is empty): "
            "leave it out."
        )
    _check_compiler(device)
    torch._inductor.config.fallback_random = True  # the same dropout masks as without compiling
    torch._dynamo.config.recompile_limit = SHAPES * len(blocks)  # torch counts all blocks together
    for block in blocks:
        # not block.compile(): it would also compile FSDP's hooks, and stop at them
        block.forward = torch.compile(block.forward)


def _check_compiler(device: torch.device) -> None:
    """Raise an error before the first step. An error from within the step would be hard to read."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise ConfigError(
                "compile=true requires Triton, which comes with torch on Linux and was not found: leave it out."
            )
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            "compile=true on a CPU requires a C++ compiler: install g++, or leave it out."
        ) from error


def not_compiled() -> AbstractContextManager[object]:
    """Run blocks without compiling. Evaluation has batches of many sizes, and each size would be compiled."""
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
