"""The costs of one operation of a trace: FLOPs, bytes read and written, and the extents that determine its speed."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flexor.plan.trace.layouts import channels_last, computes_channels_last, is_copied

Kind = Literal["matmul", "convolution", "attention", "memory", "view"]
Layout = Literal["", "nhwc", "to nhwc"]
Phase = Literal["host", "build", "load", "batch", "forward", "backward", "clip", "optimizer", "ema"]


@dataclass(slots=True)
class Op:
    """One call of an operator. `extent` and `detail` depend on the kind:

    matmul       (batch, M, N, K); `UNALIGNED_ROWS` if a row of a matrix in lower precision is no multiple of 16 bytes
    convolution  (M, N, K) of the equivalent matrix product, "forward" or "backward"
    attention    (batch, heads, queries, keys, width), the kernel, "forward" or "backward"
    memory       `OVER_ROWS` for a sum over rows, whose results are contiguous
    """

    name: str
    kind: Kind
    phase: Phase
    flops: float = 0
    read: int = 0
    written: int = 0
    dtype: torch.dtype | None = None
    extent: tuple[int, ...] = ()
    detail: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    kernels: int = 1
    host: float = 1.0
    """Host time to launch it, relative to a common operation."""
    scratch: int = 0
    """Bytes of workspace memory while the kernel runs, in addition to its results."""
    module: str = ""
    """The module of the policy that it belongs to."""
    layout: Layout = ""
    """nhwc: it reads images in channels-last format; to nhwc: a convolution that copies its input to that format."""

    def repeated(self, phase: Phase, module: str) -> Op:
        """The same call elsewhere. As fast as possible: a trace has tens of thousands."""
        return Op(
            *(self.name, self.kind, phase, self.flops, self.read, self.written, self.dtype),
            *(self.extent, self.detail, self.shapes, self.kernels, self.host, self.scratch, module),
            self.layout,
        )


OVER_ROWS = ("over rows",)
UNALIGNED_ROWS = ("unaligned rows",)
NAMESPACE = "flexor::"  # of Flexor's own kernels
ADAM_WITH_COPIES = f"{NAMESPACE}adam_with_copies"  # a kernel for each tensor
ADAMW_8BIT = f"{NAMESPACE}adamw_8bit"

# Operators that only allocate or make views, and compute nothing.
NO_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("lift_fresh", "detach", "alias", "_unsafe_view"),
}

KERNELS = {
    "native_layer_norm_backward": 2,
    "native_group_norm": 3,
    "native_group_norm_backward": 4,
    "embedding_dense_backward": 4,
    "linalg_vector_norm": 2,
    "index_put": 3,
    "_index_put_impl_": 3,
    "max_pool2d_with_indices_backward": 2,
    "_scaled_dot_product_flash_attention_backward": 3,
    "_scaled_dot_product_cudnn_attention_backward": 3,
    "_scaled_dot_product_efficient_attention_backward": 2,
}
TENSORS_PER_KERNEL = 48  # tensors of a list in one launch of a foreach or fused kernel
HOST_PER_TENSOR = 0.1  # relative to the host time to launch a common operation
HOST_OF_A_CAST = 0.6  # likewise, from ten runs in float32 and bfloat16 on the host of an H200


def describe(
    function: Any, args: Sequence[Any], ins: Sequence[Tensor], outs: Sequence[Tensor], phase: Phase
) -> Op:
    name = operator_name(function)
    if is_view(function) or name in NO_KERNEL:
        return Op(name, "view", phase)
    read, written = sum(map(nbytes, ins)), sum(map(nbytes, outs))
    dtype = next((x.dtype for x in ins if x.is_floating_point()), None)
    op = Op(name, "memory", phase, 0, read, written, dtype, shapes=tuple(tuple(x.shape) for x in ins[:3]))
    op.kernels, op.layout = KERNELS.get(name, 1), _layout(ins)
    if name.startswith(NAMESPACE):
        op.written += sum(map(nbytes, _written_tensors(function, args)))
    if name == "_to_copy":
        op.host = HOST_OF_A_CAST
    if name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"):
        _matmul(op, args[1:] if name in ("addmm", "baddbmm") else args)
    elif name in ("convolution", "_convolution", "cudnn_convolution"):
        _convolution(op, args[0], args[1], outs[0], bool(args[6]) if name == "convolution" else False)
    elif name == "convolution_backward":
        _convolution_backward(op, args)
    elif "_scaled_dot_product_" in name and "math" not in name:
        _attention(op, args)
    elif name in ("sum", "mean") and len(args) > 1 and _over_rows(args[0], args[1], outs[0]):
        op.detail = OVER_ROWS
    elif name.startswith(
        ("_foreach", "_fused_adam", "_fused_sgd", "_amp_foreach", ADAM_WITH_COPIES, ADAMW_8BIT)
    ):
        _foreach(op, args)
    return op


@functools.cache
def operator_name(function: Any) -> str:
    """Without its namespace, unless it is one of Flexor's own kernels."""
    name = str(function._schema.name)
    return name if name.startswith(NAMESPACE) else name.split("::")[-1]


def _layout(ins: Sequence[Tensor]) -> Layout:
    images = (x for x in ins if x.dim() == 4 and x.stride(1) == 1)
    return "nhwc" if any(map(channels_last, images)) else ""


def _written_tensors(function: Any, args: Sequence[Any]) -> Iterator[Tensor]:
    """Tensors that an operator modifies."""
    for argument, value in zip(function._schema.arguments, args):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(value)


@functools.cache
def is_view(function: Any) -> bool:
    results = function._schema.returns
    return bool(results) and all(r.alias_info is not None and not r.alias_info.is_write for r in results)


def nbytes(tensor: Tensor) -> int:
    """Bytes that a kernel accesses; an expanded dimension counts once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride()):
        if stride or not size:
            count *= size
    return count


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def _matmul(op: Op, factors: Sequence[Any]) -> None:
    left, right = factors[:2]
    batch = left.shape[0] if left.dim() == 3 else 1
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    op.kind, op.dtype, op.extent = "matmul", left.dtype, (batch, rows, columns, inner)
    op.flops = 2.0 * batch * rows * columns * inner
    in_rows = (_has_aligned_rows(left), _has_aligned_rows(right), columns * left.element_size() % 16 == 0)
    if left.element_size() < 4 and not all(in_rows):
        op.detail = UNALIGNED_ROWS


def _has_aligned_rows(matrix: Tensor) -> bool:
    rows = matrix.stride(-2) if matrix.stride(-1) == 1 else matrix.stride(-1)
    return rows * matrix.element_size() % 16 == 0


def _product(x: Tensor, weight: Tensor, out: Tensor, transposed: bool) -> tuple[int, int, int]:
    """The matrix product equivalent to a convolution; groups are in the weight's second dimension."""
    taps = math.prod(weight.shape[2:])
    if transposed:
        return x.shape[0] * math.prod(x.shape[2:]), weight.shape[1] * taps, weight.shape[0]
    return x.shape[0] * math.prod(out.shape[2:]), weight.shape[0], weight.shape[1] * taps


def _convolution(op: Op, x: Tensor, weight: Tensor, out: Tensor, transposed: bool) -> None:
    op.kind, op.dtype, op.detail = "convolution", x.dtype, ("forward",)
    op.layout = _layout_of_convolution(x, weight)
    op.extent = _product(x, weight, out, transposed)
    op.flops = 2.0 * math.prod(op.extent)


def _layout_of_convolution(x: Tensor, weight: Tensor) -> Layout:
    if not computes_channels_last(x, weight):
        return ""
    return "to nhwc" if is_copied(x) else "nhwc"


def _convolution_backward(op: Op, args: Sequence[Any]) -> None:
    gradient, x, weight, output_mask = args[0], args[1], args[2], args[10]
    op.kind, op.dtype, op.detail = "convolution", x.dtype, ("backward",)
    op.layout = _layout_of_convolution(x, weight)
    op.extent = _product(x, weight, gradient, bool(args[7]))
    op.kernels = max(1, sum(map(bool, output_mask)))
    op.flops = 2.0 * math.prod(op.extent) * (bool(output_mask[0]) + bool(output_mask[1]))


def _attention(op: Op, args: Sequence[Any]) -> None:
    backward = op.name.endswith("_backward")
    q, k = args[1:3] if backward else args[:2]
    backend = next((b for b in ("cudnn", "flash", "efficient") if b in op.name), "math")
    op.kind, op.dtype = "attention", q.dtype
    op.detail = (backend, "backward" if backward else "forward")
    op.extent = (*q.shape[:3], k.shape[2], q.shape[3])
    op.flops = 4.0 * math.prod(op.extent) * (2.5 if backward else 1)


def _over_rows(x: Tensor, dims: Any, out: Tensor) -> bool:
    over_dims = x.dim() > 1 and isinstance(dims, list | tuple) and bool(dims)
    return over_dims and {x.dim() - 1, -1}.isdisjoint(dims) and x.stride(-1) == 1 and x.dtype == out.dtype


def _foreach(op: Op, args: Sequence[Any]) -> None:
    """A kernel for a list of tensors, with several tensors per launch."""
    count = len(args[0])
    op.kernels = count if op.name == ADAM_WITH_COPIES else max(1, count // TENSORS_PER_KERNEL)
    op.host = max(2.0, HOST_PER_TENSOR * count)
    op.shapes = ()
    if op.name.startswith("_fused"):  # it returns None and writes all that it reads, except for the gradients
        op.written = op.read - sum(map(nbytes, args[1]))
