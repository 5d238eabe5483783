"""Memory that no tensor shows: what cuBLAS, cuDNN and attention's backward pass take while they work.

It goes through torch's allocator too, so it is part of the peak. Sizes are torch's source where they are written
there, and measured on an H200 where a library decides for itself (convolutions).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexor.plan.dialect import HALF
from flexor.plan.ops import Op, nbytes

# Written as in CUBLAS_WORKSPACE_CONFIG, in KiB: number of buffers of a size.
CUBLAS = (2 * 4096 + 8 * 16) * 1024
CUBLAS_HOPPER = 32 << 20  # and Blackwell's large parts

TABLE_ROW = 4 * 8  # bytes per element that sorting the tokens of an embedding takes, and their count
LAYER_NORM_PARTS = 2 * 132  # partial sums of the gradients of scale and shift


def cublas_workspace(capability: tuple[int, int] | None) -> int:
    """Bytes that cuBLAS keeps for each thread that multiplies: one goes forward, one backward."""
    if capability is None:
        return 0
    return CUBLAS_HOPPER if capability in ((9, 0), (10, 0)) else CUBLAS


def scratch(op: Op, args: Sequence[Any], outs: Sequence[Tensor], tf32: bool = True) -> int:
    """Bytes that a kernel allocates besides its results, and lets go of when it is done."""
    if op.kind == "convolution":
        return _convolution(op, args, outs, tf32)
    if op.kind == "attention" and op.detail[1] == "backward":
        return _attention_backward(op)
    if op.name == "native_layer_norm_backward":
        features = args[2][0] if isinstance(args[2], list | tuple) and args[2] else 1
        return LAYER_NORM_PARTS * 4 * int(features)
    if op.name == "embedding_dense_backward":
        return int(args[1].numel()) * (TABLE_ROW + 8)
    if op.name == "_foreach_norm":
        # a partial sum for each chunk of 65,536 elements, padded to the longest tensor
        longest = max(tensor.numel() for tensor in args[0])
        return len(args[0]) * -(-longest // 65536) * 4
    return 0


def _convolution(op: Op, args: Sequence[Any], outs: Sequence[Tensor], tf32: bool) -> int:
    """Copies of input and output with channels last, which is what tensor cores read."""
    if op.detail[0] == "backward":
        gradient, x = args[0], args[1]
    else:
        gradient, x = outs[0], args[0]
    on_tensor_cores = op.dtype in HALF or tf32
    if not on_tensor_cores or channels_last(x):
        return 0
    return nbytes(x) + nbytes(gradient)


def channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _attention_backward(op: Op) -> int:
    """The gradient of the queries is summed in float32, and each row's sum is kept beside it."""
    batch, heads, queries, _, width = op.extent
    if op.detail[0] == "flash":
        rows = _up(queries, 128)
        return batch * heads * rows * 4 * ((_up(width, 32) if width <= 128 else _up(width, 64)) + 1)
    if op.detail[0] == "cudnn":
        return batch * heads * _up(queries, 64) * (4 * _up(width, 8) + 8)
    return batch * heads * (_up(queries, 64) * _up(width, 64) + queries) * 4


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
