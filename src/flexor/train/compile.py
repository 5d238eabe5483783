"""torch.compile for the blocks of a policy, in place. Parameter names, checkpoints and strategies do not change."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import AbstractContextManager

import torch

from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.machine import keep_compiled_code
from flexor.policies.base import Policy

SHAPES = 8  # input shapes that a block may be compiled for, before torch gives up


def compile_blocks(policy: Policy, device: torch.device) -> None:
    """Compile each block of the policy, at its first step. Code between blocks, such as noise, is not compiled."""
    keep_compiled_code()
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


class CompileTime:
    """Logs how long blocks took to compile, after the steps in which they did."""

    def __init__(self, policy: Policy):
        self.blocks = len(policy.shard_units())
        self.seconds = 0.0
        """Of all steps so far."""
        self._total, self._lookups = _compile_seconds(), _cache_lookups()

    def log(self) -> bool:
        """Call after each step. If the step compiled something, it logs a line and returns true."""
        seconds = _compile_seconds() - self._total
        if seconds <= 0:
            return False
        lookups = _cache_lookups()
        line = _describe(self.blocks, seconds, lookups - self._lookups)
        log.info("%s%s", line, " (again, for other inputs)" if self.seconds else "")
        self.seconds += seconds
        self._total, self._lookups = self._total + seconds, lookups
        return True


def _describe(count: int, seconds: float, lookups: Counter[str]) -> str:
    blocks = "1 block" if count == 1 else f"{count} blocks"
    time = f"{seconds:.{0 if seconds >= 10 else 1}f} s"
    cache = f"the cache ({os.environ.get('TORCHINDUCTOR_CACHE_DIR')})"
    if lookups["bypass"] or not (lookups["hit"] or lookups["miss"]):
        return f"compiled {blocks} in {time}"
    if not lookups["miss"]:
        return f"took {blocks} from {cache} in {time}"
    return f"compiled {blocks} in {time}; the next run with the same settings takes them from {cache}"


def _compile_seconds() -> float:
    """Seconds that this process has spent compiling, forward and backward."""
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent().get("total_wall_time", 0.0)


def _cache_lookups() -> Counter[str]:
    """What was in the cache (hit), what was not (miss), and what can't be there (bypass)."""
    from torch._dynamo.utils import counters

    return Counter({n: counters["inductor"][f"fxgraph_cache_{n}"] for n in ("hit", "miss", "bypass")})


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
            "compile=true on a CPU needs a C++ compiler: install g++, or leave it out."
        ) from error


def not_compiled() -> AbstractContextManager[object]:
    """Run blocks without compiling. Evaluation has batches of many sizes, and each size would be compiled."""
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
