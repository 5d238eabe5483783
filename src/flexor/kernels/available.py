"""Whether a device runs Flexor's Triton kernels."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import torch

import flexor.kernels.norm  # noqa: F401 (defines the operator that is tried)
from flexor.core.log import log

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def has_kernels(device: torch.device) -> bool:
    """On the meta device, a plan asks what a GPU does. torch.compile requires Triton anyway."""
    if device.type == "cuda":
        return torch.compiler.is_compiling() or can_compile(device)
    return device.type == "meta"


@functools.cache
def can_compile(device: torch.device) -> bool:
    """Whether Triton can compile for this device, which requires a C compiler. Warns once if it can't."""
    ones = torch.ones((1, 16), device=device)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            torch.ops.flexor.norm_apply(ones.view(1, 16, 1, 1), ones, ones, None, True)
    except Exception as error:  # whatever stops Triton, torch has kernels too
        reason = str(error).strip().splitlines() or [type(error).__name__]
        log.warning(
            "Triton can't compile Flexor's kernels (%s): PyTorch's are used, which are slower.",
            reason[0].rstrip("."),
        )
        return False
    return True
