"""Workspace memory that belongs to no tensor: of cuBLAS, cuDNN and the backward pass of attention.

It comes from torch's allocator too, so it is part of the peak. Sizes are from torch's source code where they are
defined there, and measured on an H200 where a library chooses them (convolutions).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexor.plan.trace.cuda_on_meta import HALF
from flexor.plan.trace.layouts import as_image, computes_channels_last, is_copied
from flexor.plan.trace.ops import OVER_ROWS, Op, nbytes

# As in CUBLAS_WORKSPACE_CONFIG, in KiB: number of buffers of each size.
CUBLAS = (2 * 4096 + 8 * 16) * 1024
CUBLAS_HOPPER = 32 << 20  # and of large Blackwell GPUs

TABLE_ROW = 4 * 8  # bytes per element to sort and count the tokens of an embedding
MULTIPROCESSORS = 132  # of an H200; a smaller GPU splits work into fewer parts and needs less memory for them
LAYER_NORM_PARTS = 2 * MULTIPROCESSORS  # partial sums of the gradients of scale and shift
TILE = 128 * 128 * 4  # bytes of one tile of a matrix product, in float32
PARTS = 16  # parts of a weight's gradient, which are computed in parallel and added up
THREADS = 2048  # per multiprocessor
LARGEST = 2**31 - 1  # elements in a tensor that cuDNN supports


def cublas_workspace(capability: tuple[int, int] | None) -> int:
    """Bytes that cuBLAS keeps per thread with matrix products: one for the forward pass, one for the backward pass."""
    if capability is None:
        return 0
    return CUBLAS_HOPPER if capability in ((9, 0), (10, 0)) else CUBLAS


def scratch(op: Op, args: Sequence[Any], outs: Sequence[Tensor]) -> int:
    """Bytes of workspace memory that a kernel allocates in addition to its results, and frees at its end."""
    if op.kind == "convolution":
        return round(_convolution(op, args, outs) * share_at_once(op))
    if op.kind == "attention" and op.detail[1] == "backward":
        return _attention_backward(op)
    if op.name == "native_layer_norm_backward":
        features = args[2][0] if isinstance(args[2], list | tuple) and args[2] else 1
        return LAYER_NORM_PARTS * 4 * int(features)
    if op.name == "embedding_dense_backward":
        return int(args[1].numel()) * (TABLE_ROW + 8)
    if op.detail == OVER_ROWS:
        return partial_sums(op)
    if op.name == "index":
        return _indices(args[1])
    if op.name == "_foreach_norm":
        # a partial sum for each chunk of 65,536 elements, padded to the longest tensor
        longest = max(tensor.numel() for tensor in args[0])
        return len(args[0]) * -(-longest // 65536) * 4
    return 0


def _convolution(op: Op, args: Sequence[Any], outs: Sequence[Tensor]) -> int:
    """Copies of input, weight and output in the channels-last layout, which tensor cores require.

    If there are few channels, they are padded with zeros. A weight's gradient is computed in parts.
    """
    backward = op.detail[0] == "backward"
    y, x, weight = (args[0], args[1], args[2]) if backward else (outs[0], args[0], args[1])
    if computes_channels_last(x, weight):
        # measured on an H200: of float32 images, the forward pass makes one more copy
        more = nbytes(x) if op.dtype == torch.float32 and x.shape[1] < 4 and not backward else 0
        return more + _to_channels_last(x, [weight, y] if backward else [weight])
    taps = math.prod(weight.shape[2:])
    if taps == 1 and not backward and (x.shape[2:] == y.shape[2:] or x.shape[1] <= 64):
        return 0  # a matrix product without copies
    lanes = 8 if op.dtype in HALF else 4 if backward else 1
    copies = nbytes(x) * max(x.shape[1], lanes) // x.shape[1] + nbytes(y)
    if not x.is_contiguous():
        copies += nbytes(x)
    if taps > 1:
        copies += nbytes(weight)
    if backward:
        copies += min(PARTS * nbytes(weight), MULTIPROCESSORS * TILE)
    return copies


def _to_channels_last(x: Tensor, tensors: Sequence[Tensor]) -> int:
    """Copies of what is not in the channels-last format; of one dimension, the input is first made contiguous."""
    twice = nbytes(x) if x.dim() == 3 and not x.is_contiguous() else 0
    copied = [t for t in tensors if not as_image(t).is_contiguous(memory_format=torch.channels_last)]
    return twice + nbytes(x) * is_copied(x) + sum(map(nbytes, copied))


def share_at_once(op: Op) -> float:
    """Share of the samples that a convolution processes at once: torch splits tensors too large for cuDNN's indices.

    Measured on an H200: TD-MPC's first convolution, 1,405 to 6,195 images of 448x448 pixels.
    """
    samples = op.shapes[0][0]
    numbers = [math.prod(shape) for shape in op.shapes[:2]]
    if op.detail[0] == "forward":
        numbers.append(op.extent[0] * op.extent[1])  # its result
    each = max(numbers) // samples
    return min(samples, max(1, LARGEST // each)) / samples


def partial_sums(op: Op) -> int:
    """Bytes of partial sums: a sum over many rows is split among blocks of threads, and each block stores its part.

    The calculation is that of torch's reductions: four columns per thread if they can be read at once, 512 / 4 threads
    per block, wide before tall, and as many blocks as keep the GPU busy with at least 16 rows per thread.
    """
    if op.dtype is None or not op.written:
        return 0
    rows, columns = op.read // op.written, op.written // op.dtype.itemsize
    vector = next(n for n in (4, 2, 1) if columns % n == 0)
    threads = 512 // vector
    width = min(_power(columns // vector), 32)
    height = min(_power(rows), threads // width)
    width = min(_power(columns // vector), threads // height)
    each = -(-rows // height)
    grid = -(-columns // (vector * width))
    busy = MULTIPROCESSORS * (THREADS // (width * height))
    if each < 256 or grid > busy:
        return 0
    blocks = max(min(-(-busy // grid), -(-each // 16)), -(-each // 256))
    return 4 * columns * blocks * width * vector if blocks > 1 else 0


def _power(value: int) -> int:
    """The largest power of two that is not greater than the value."""
    return 1 << (max(1, value).bit_length() - 1)


def _indices(indices: Sequence[Tensor | None]) -> int:
    """Index tensors with different memory layouts are copied to the same layout."""
    broadcast = torch.broadcast_tensors(*(index for index in indices if index is not None))
    if len({index.stride() for index in broadcast}) < 2:
        return 0
    return sum(index.numel() * 8 for index in broadcast if not index.is_contiguous())


def _attention_backward(op: Op) -> int:
    """The gradient of the queries is accumulated in float32, and one sum per row is stored in addition."""
    batch, heads, queries, _, width = op.extent
    if op.detail[0] == "flash":
        rows = _up(queries, 128)
        return batch * heads * rows * 4 * ((_up(width, 32) if width <= 128 else _up(width, 64)) + 1)
    if op.detail[0] == "cudnn":
        return batch * heads * _up(queries, 64) * (4 * _up(width, 8) + 8)
    return batch * heads * (_up(queries, 64) * _up(width, 64) + queries) * 4


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
