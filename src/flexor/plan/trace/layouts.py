"""The memory format of convolutions on CUDA. On the meta device, torch does not know it.

cuDNN computes in channels-last format if the input or the weight has it, and its results have it too. What has another
format is copied for the time of the kernel. A one-dimensional convolution is computed as that of a flat image. There
torch first makes the input contiguous, so only the weight decides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten


def channels_last(x: Tensor) -> bool:
    """Whether torch takes a tensor for a channels-last one."""
    x = as_image(x)
    return x.dim() == 4 and suggest_memory_format(x) == torch.channels_last


def as_image(x: Tensor) -> Tensor:
    """[B, C, L] as a flat image [B, C, 1, L]."""
    return x.unsqueeze(2) if x.dim() == 3 else x


def computes_channels_last(x: Tensor, weight: Tensor) -> bool:
    return x.dtype != torch.float64 and (channels_last(weight) or (x.dim() == 4 and channels_last(x)))


def is_copied(x: Tensor) -> bool:
    """Whether a convolution in channels-last format copies its input."""
    return x.dim() == 3 or not as_image(x).is_contiguous(memory_format=torch.channels_last)


def with_layout(function: Any, args: Any, out: Any) -> Any:
    """The result of an operator on the meta device, in the memory format that it has on CUDA."""
    if function is aten.convolution.default:
        return _like(out, computes_channels_last(args[0], args[1]))
    if function is aten.convolution_backward.default:
        last = computes_channels_last(args[1], args[2])
        of_input, of_weight, *rest = out
        return (_like(of_input, last), _like(of_weight, last), *rest)
    return out


def _like(x: Tensor | None, last: bool) -> Tensor | None:
    if x is None or x.dim() not in (3, 4) or (not last and x.is_contiguous()):
        return x
    format = torch.channels_last if last else torch.contiguous_format
    image = torch.empty(as_image(x).shape, dtype=x.dtype, device=x.device, memory_format=format)
    strides = image.stride() if x.dim() == 4 else (*image.stride()[:2], image.stride()[3])
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
