"""Make torch treat meta tensors like CUDA tensors: it takes the code paths of a GPU, without having one.

Tensors on the meta device have shapes but no memory, and torch can compute with them on any machine. But there torch
takes the code paths of an unknown device: no autocast, no fused attention, no fused optimizer, dropout by
multiplication. Each of these changes what is stored for the backward pass (dropout alone is 12 % of ACT's memory).
Inside `with CudaOnMeta(...)`, torch takes the code paths of the planned GPU. The rules here describe torch 2.7 to
2.13. `tests/plan/trace/test_cuda_on_meta.py` compares them with torch's own fake CUDA tensors, and fails when one of
them changes.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexor.plan.trace.kernels import Mish, RMSNorm
from flexor.plan.trace.ops import tensors_in
from flexor.plan.trace.shortcuts import ONE_TRACE

HALF = (torch.float16, torch.bfloat16)
# Code that reads values only for its caller: torch, and the planner itself
CALLED_CODE = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)

Backend = Literal["cudnn", "flash", "efficient", "math"]
Capability = tuple[int, int] | None


class SyncPoint(NamedTuple):
    """A line where the host waits for the GPU: it reads a value, or makes a tensor from values."""

    name: str
    """Name of the operation, such as `item`."""
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.name.strip('_')} in {Path(self.file).name}, line {self.line}"


def _sync_point(name: str) -> SyncPoint:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(CALLED_CODE):
        frame = frame.f_back
    return (
        SyncPoint(name, "", 0) if frame is None else SyncPoint(name, frame.f_code.co_filename, frame.f_lineno)
    )


class Card(Protocol):
    """What a plan needs to know about a GPU; see `hardware.GPU`."""

    @property
    def memory(self) -> int: ...
    @property
    def compute_capability(self) -> tuple[int, int] | None: ...


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Autocast's rules, by the names that Python code calls (ATen/autocast_mode.h). Functions in no list run in the type of
# their inputs; `cat` and `stack` promote it inside their kernels.
LOWER_PRECISION = _names(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution addmm addmv addr matmul "
    "__matmul__ __rmatmul__ einsum mm mv linear addbmm baddbmm bmm chain_matmul linalg_multi_dot prelu linalg_vecdot "
    "scaled_dot_product_attention"
)
FP32 = _names(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ square "
    "softplus layer_norm native_layer_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss "
    "cosine_embedding_loss nll_loss nll_loss2d nll_loss_nd hinge_embedding_loss kl_div l1_loss smooth_l1_loss "
    "huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
    "multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp cross_entropy_loss norm "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
    "upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)
if torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA"):  # not in every torch
    FP32 |= {"rms_norm"}
FP32_RESULT = _names(
    "prod softmax log_softmax cumprod cumsum linalg_norm linalg_vector_norm linalg_matrix_norm sum"
)
PROMOTE = _names("addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put tensordot scatter_add")

# Functions written in Python that call other functions, which must be intercepted too.
WRITTEN_IN_PYTHON = {"torch.nn.functional", "torch.functional", "torch._tensor", "torch._jit_internal"}
OVERRIDES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")

# Methods that read a tensor's value. Meta tensors have none: a new policy's flags are false and its counters zero.
VALUES: dict[str, Callable] = {"__bool__": bool, "__int__": int, "__float__": float, "__index__": int}

# Functions that copy values from the host, and wait until they have arrived.
MADE_OF_VALUES = {"tensor", "as_tensor", "new_tensor", "asarray"}


def attention_backend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, capability: tuple[int, int] | None
) -> Backend:
    """The kernel that torch selects for `scaled_dot_product_attention`, in torch's order of preference."""
    sm = 0 if capability is None else 10 * capability[0] + capability[1]
    half, width, value_width = q.dtype in HALF, q.shape[-1], v.shape[-1]
    if half and sm in (90, 100) and _version() >= (2, 11):
        widest = 256 if sm == 90 else 128
        if width % 8 == 0 and value_width % 8 == 0 and max(width, value_width) <= widest:
            return "cudnn"
    if half and mask is None and sm >= 80 and width == value_width and width <= 256:
        return "flash"
    no_bfloat16 = q.dtype == torch.bfloat16 and sm < 80
    if sm >= 50 and not no_bfloat16 and width % (8 if half else 4) == 0:
        return "efficient"
    return "math"


def like_in_kernels(capability: Capability) -> Capability:
    """One GPU for all that have the same attention kernels in torch."""
    if capability is None or capability in ((9, 0), (10, 0)):
        return capability
    return (7, 5) if capability < (8, 0) else (8, 0)


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


class CudaOnMeta(TorchFunctionMode):
    """A context in which torch treats meta tensors like CUDA tensors on a GPU of this compute capability."""

    def __init__(self, capability: tuple[int, int] | None = (9, 0), device: str = "meta"):
        super().__init__()
        self.capability, self.device = capability, device
        self.dtype: torch.dtype | None = None  # autocast's; None while it is off
        self.sync_points: list[SyncPoint] = []
        self.attention: dict[tuple, Backend] = {}
        self.on_cast: Callable[[Tensor], None] = lambda copy: None  # called with the cast copy of a weight
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}  # autocast's cache: weight -> its copy
        self._copies: dict[Callable, Callable] = {}
        self._active: set[Callable] = set()  # Python functions that are being called

    @contextlib.contextmanager
    def active(self) -> Iterator[CudaOnMeta]:
        """Enter the mode, and patch torch's own device checks."""
        with ONE_TRACE, contextlib.ExitStack() as stack:
            for replacement in self._replacements():
                stack.enter_context(mock.patch.object(*replacement))
            stack.enter_context(self)
            yield self

    def _replacements(self) -> list[tuple[Any, str, Any]]:
        """Modules, names in them, and what takes their place."""
        from torch.optim import optimizer as optim
        from torch.utils import _foreach_utils as foreach
        from torch.utils import checkpoint

        name = "_checkpoint_without_reentrant_generator"
        recomputing = self._recomputing(getattr(checkpoint, name), checkpoint.noop_context_fn)
        replacements: list[tuple[Any, str, Any]] = [(checkpoint, name, recomputing)]
        for name in ("_get_fused_kernels_supported_devices", "_get_foreach_kernels_supported_devices"):
            devices = [*getattr(foreach, name)(), self.device]
            replacements += [(module, name, lambda devices=devices: devices) for module in (foreach, optim)]
        autocast = self._autocast_class()
        modules = (torch, torch.amp, torch.amp.autocast_mode)
        replacements += [(module, "autocast", autocast) for module in modules]
        return replacements + [(torch, f.__name__, f) for f in self._autocast_queries()]

    # Autocast. torch's own does not support the meta device.

    @contextlib.contextmanager
    def autocast(self, dtype: torch.dtype | None) -> Iterator[None]:
        before, self.dtype = self.dtype, dtype
        try:
            yield
        finally:
            self.dtype = before
            if before is None:
                self._casts.clear()

    def _autocast_class(self) -> type:
        cuda, original = self, torch.autocast

        class Autocast(contextlib.ContextDecorator):
            def __init__(
                self,
                device_type: str,
                dtype: torch.dtype | None = None,
                enabled: bool = True,
                cache_enabled: bool | None = None,
            ):
                self.inner: Any = None
                if device_type not in (cuda.device, "cuda"):
                    self.inner = original(device_type, dtype, enabled, cache_enabled)
                self.dtype = (dtype or torch.float16) if enabled else None

            def __enter__(self) -> Any:
                if self.inner is None:
                    self.inner = cuda.autocast(self.dtype)
                return self.inner.__enter__()

            def __exit__(self, *error: Any) -> Any:
                return self.inner.__exit__(*error)

        return Autocast

    def _autocast_queries(self) -> tuple[Callable, Callable]:
        enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype

        def is_autocast_enabled(*device: str) -> bool:
            return self.dtype is not None if device == (self.device,) else enabled(*device)

        def get_autocast_dtype(device: str) -> torch.dtype:
            return self.dtype if device == self.device and self.dtype is not None else dtype(device)

        return is_autocast_enabled, get_autocast_dtype

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._cast(each, dtype) for each in value)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if value.dtype in (dtype, torch.float64) or value.device.type != self.device:
            return value
        is_weight = value.is_leaf and value.requires_grad and value._base is None
        if dtype == torch.float32 or value.dtype != torch.float32 or not is_weight:
            return value.to(dtype)
        if id(value) not in self._casts:
            self._casts[id(value)] = (value, copy := value.to(dtype))
            self.on_cast(copy)
        return self._casts[id(value)][1]

    def _autocast_arguments(self, name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        assert self.dtype is not None
        if name in LOWER_PRECISION or name in FP32:
            dtype = self.dtype if name in LOWER_PRECISION else torch.float32
            return self._cast(args, dtype), {key: self._cast(value, dtype) for key, value in kwargs.items()}
        first = args[0] if args else kwargs.get("input")
        if name in FP32_RESULT and isinstance(first, Tensor) and first.dtype in HALF:
            explicit = kwargs.get("dtype") or any(isinstance(value, torch.dtype) for value in args)
            return args, kwargs if explicit else {**kwargs, "dtype": torch.float32}
        if name in PROMOTE:
            dtypes = {t.dtype for t in tensors_in(args) if t.is_floating_point()}
            if len(dtypes) > 1:
                return self._cast(args, torch.float32), kwargs
        return args, kwargs

    # The autograd engine disables function modes, but recomputes checkpointed blocks. There the mode is entered again.

    def _recomputing(self, original: Callable, no_context: Callable) -> Callable:
        def generator(
            fn: Callable, preserve: bool = True, context_fn: Callable = no_context, *args: Any, **kwargs: Any
        ) -> Any:
            def contexts() -> tuple[Any, Any]:
                forward, recomputation = context_fn()
                return forward, self._reentered(recomputation, self.dtype)

            return original(fn, preserve, contexts, *args, **kwargs)

        return generator

    @contextlib.contextmanager
    def _reentered(self, context: Any, dtype: torch.dtype | None) -> Iterator[None]:
        casts, self._casts = self._casts, {}
        before, self.dtype = self.dtype, dtype
        try:
            with context, self:
                yield
        finally:
            self._casts, self.dtype = casts, before

    # Interception of calls.

    def __torch_function__(
        self, function: Any, types_: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tuple(args), kwargs or {}
        name = getattr(function, "__name__", "")
        if name in ("__get__", "__set__"):  # most calls: shapes, types and devices are read
            return function(*args, **kwargs)
        if getattr(function, "_qualified_op_name", "").startswith("flexor::"):
            return function(*args, **kwargs)
        if name in VALUES or name == "item":
            return self._value(name, function, args)
        if name in MADE_OF_VALUES and not isinstance(args[-1], Tensor):
            like = args[0].device if isinstance(args[0], Tensor) else "cpu"
            if torch.device(kwargs.get("device") or like).type == self.device:
                self.sync_points.append(_sync_point(name))
        in_python = isinstance(function, types.FunctionType) and function.__module__ in WRITTEN_IN_PYTHON
        if in_python and function not in self._active:
            self._active.add(function)
            try:
                with self:
                    return self._without_overrides(function)(*args, **kwargs)
            finally:
                self._active.discard(function)
        if self.dtype is not None:
            args, kwargs = self._autocast_arguments(name, args, kwargs)
        if name in DIFFERENT and args and isinstance(args[0], Tensor) and args[0].device.type == self.device:
            return getattr(self, f"_call_{name}")(function, *args, **kwargs)
        return function(*args, **kwargs)

    def _without_overrides(self, function: Any) -> Callable:
        """A copy of a Python function of torch that does not check for modes itself, so that its calls come here."""
        if function not in self._copies:
            names = {**function.__globals__, **dict.fromkeys(OVERRIDES, lambda *args: False)}
            copy = types.FunctionType(
                function.__code__, names, function.__name__, function.__defaults__, function.__closure__
            )
            copy.__kwdefaults__ = function.__kwdefaults__
            self._copies[function] = copy
        return self._copies[function]

    def _value(self, name: str, function: Any, args: tuple) -> Any:
        tensor = args[0]
        if not isinstance(tensor, Tensor) or tensor.device.type != "meta":
            return function(*args)
        self.sync_points.append(_sync_point(name))
        item = bool if tensor.dtype == torch.bool else float if tensor.is_floating_point() else int
        return VALUES.get(name, item)(0)

    # Operations that CUDA computes differently.

    def _call_dropout(self, function: Any, x: Tensor, p: float = 0.5, train: bool = True, **_: Any) -> Tensor:
        """One kernel, which stores a mask of bytes."""
        if not train or not 0 < p < 1:
            return function(x, p, train)
        return torch.native_dropout(x, p, True)[0]

    def _call_mish(self, function: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return Mish.apply(x)

    def _call_rms_norm(
        self, function: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: Any = None
    ) -> Tensor:
        return RMSNorm.apply(x, weight, len(shape))

    def _call_batch_norm(self, function: Any, x: Tensor, *args: Any) -> Tensor:
        """cuDNN's kernel where it is supported: it reserves memory between forward and backward pass."""
        weight, bias, mean, var, training, momentum, eps = args[:7]
        if not training or weight is None or x.dtype not in (torch.float32, torch.float16):
            return function(x, *args)
        return torch.ops.aten.cudnn_batch_norm(x, weight, bias, mean, var, True, momentum, eps)[0]

    def _call_scaled_dot_product_attention(
        self,
        function: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        backend = attention_backend(q, k, v, attn_mask, self.capability)
        self.attention[tuple(q.shape), tuple(k.shape), q.dtype, attn_mask is not None] = backend
        if enable_gqa and backend != "flash":
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        bias = _as_bias(attn_mask, q)
        if bias is not None and backend in ("cudnn", "efficient"):
            if backend == "efficient":
                bias = _aligned(bias)
            bias = bias.expand(*q.shape[:3], k.shape[2])
        keep = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
        ops = torch.ops.aten
        if backend == "flash":
            return ops._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
        if backend == "math" and dropout_p > 0:
            return _unfused_attention(q, k, v, bias, dropout_p, is_causal, scale)
        if backend == "math":
            return ops._scaled_dot_product_attention_math(q, k, v, bias, dropout_p, is_causal, scale=scale)[0]
        fused = getattr(ops, f"_scaled_dot_product_{backend}_attention")
        return fused(q, k, v, bias, keep, dropout_p, is_causal, scale=scale)[0]


DIFFERENT = {name.removeprefix("_call_") for name in vars(CudaOnMeta) if name.startswith("_call_")}


def _as_bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Convert a boolean mask to a bias that is added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero, masked = (torch.scalar_tensor(x, dtype=q.dtype, device=q.device) for x in (0.0, -math.inf))
    return torch.where(mask, zero, masked)


def _unfused_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, is_causal: bool, scale: float | None
) -> Tensor:
    """Attention from plain operations, with CUDA's dropout. torch's own function would use that of the meta device."""
    dtype = q.dtype
    if dtype in HALF:
        q, k, v = q.float(), k.float(), v.float()
    root = math.sqrt(scale or 1 / math.sqrt(q.shape[-1]))
    q = q * root
    if is_causal:
        causal = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        bias = _as_bias(causal, q)
    scores = q @ (k.transpose(-2, -1) * root)
    if bias is not None:
        scores = scores + bias
    weights = torch.native_dropout(torch._safe_softmax(scores, -1), dropout, True)[0]
    out, _ = (weights @ v).to(dtype), weights.to(dtype)  # torch's own function returns the weights too
    return out


def _aligned(bias: Tensor) -> Tensor:
    """The kernel requires rows that start at multiples of eight elements; other biases are copied."""
    if bias.stride(-1) == 1 and not any(stride % 8 for stride in bias.stride()[:-1]):
        return bias
    keys = bias.shape[-1]
    return torch.nn.functional.pad(bias, (0, -keys % 8))[..., :keys]
