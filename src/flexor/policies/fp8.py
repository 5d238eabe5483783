"""Linear layers of large models in fp8, for training: half the time of their products, and less memory than in bf16.

The three products of a layer have fp8 factors (`kernels/fp8.py`): the input and the weight in e4m3, the gradient of the
output in e5m2, which has fewer digits and a wider range. Scales follow from the values at hand, so a run has no state
of its own. The weight is cast in each forward pass, and its transpose in the backward pass: nothing of it is kept in
between. Of the input, only the transpose is kept, in fp8.

Everything else is computed as in bf16: norms, attention, embeddings, heads, the weights and their updates.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from flexor.core.errors import ConfigError
from flexor.kernels.fp8 import E4M3, E5M2, MULTIPLE, Fp8Matrix, cast, largest_magnitudes, product
from flexor.policies.adapters import LoraLinear
from flexor.policies.base import Policy
from flexor.policies.nn.autocast import autocast_type

LEAST_WIDTH = 450
"""in * out / (in + out) of the narrowest layer that gains from fp8. Below some 400, by the data sheets of NVIDIA GPUs,
casting its input and gradient takes longer than its products save."""
LEAST_ROWS = 256
"""With fewer, as for the conditions of adaptive norms, reading the weight takes longer than the product."""


class LatestInput:
    """The input that was cast last: the next layers may have the same, such as q, k and v. Forgotten with the input."""

    def __init__(self) -> None:
        self.forget()

    def forget(self, _: Any = None) -> None:
        self.reference: weakref.ref[Tensor] | None = None
        self.version = 0
        self.matrix: Fp8Matrix | None = None

    def matrix_of(self, x: Tensor, transposed: bool) -> Fp8Matrix:
        """x [..., K] as a matrix."""
        matrix = self.matrix
        same = self.reference is not None and self.reference() is x and self.version == x._version
        if same and matrix is not None and (matrix.transposed.numel() or not transposed):
            return matrix
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        matrix = cast(rows, largest_magnitudes(rows), E4M3, transposed=transposed)
        self.forget()
        if x.requires_grad:  # the others may be a batch, which a CUDA graph reads again with other values
            self.reference, self.version, self.matrix = weakref.ref(x, self.forget), x._version, matrix
        return matrix


LATEST = LatestInput()


class Fp8Linear(nn.Linear):
    """Not constructed: an existing layer gets this class. It computes in fp8 when it is trained under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.in_features
        if not self.training or not torch.is_autocast_enabled(x.device.type) or rows < LEAST_ROWS:
            return super().forward(x)
        return _Fp8Linear.apply(x, self.weight, self.bias, autocast_type(x))


class Fp8LoraLinear(LoraLinear, Fp8Linear):
    """The product of the weight in fp8, and that of the adapter in bf16."""


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        trained = ctx.needs_input_grad[1]
        inputs = LATEST.matrix_of(x, trained)
        maxima = largest_magnitudes(weight)
        weights = cast(weight, maxima, E4M3, transposed=False)
        ctx.save_for_backward(inputs.transposed, inputs.inverse_scale, weight, maxima)
        ctx.input_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        out = product(
            *(inputs.straight, weights.straight),
            (inputs.inverse_scale, weights.inverse_scale),
            dtype,
            None if bias is None else bias.to(dtype),
            exact_sums=False,
        )
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inputs, inverse_scale, weight, maxima = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        outs = cast(rows, largest_magnitudes(rows), E5M2, straight=of_x, transposed=of_weight)
        dx = dweight = dbias = None
        if of_x:
            weights = cast(weight, maxima, E4M3, straight=False)
            scales = outs.inverse_scale, weights.inverse_scale
            dx = product(outs.straight, weights.transposed, scales, ctx.input_dtype, exact_sums=True)
            dx = dx.view(*gradient.shape[:-1], -1)
        if of_weight:
            scales = outs.inverse_scale, inverse_scale
            dweight = product(outs.transposed, inputs, scales, weight.dtype, exact_sums=True)
        if of_bias:
            dbias = rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dweight, dbias, None


def compute_in_fp8(policy: Policy) -> None:
    """From here on, the wide linear layers of the policy's blocks compute in fp8 when they are trained."""
    layers = {layer for block in policy.shard_units() for layer in _wide_layers(block)}
    if not layers:
        raise ConfigError(
            f"precision=fp8: policy.type={policy.config.type} has no linear layers that are wide enough to be faster "
            "in fp8. Use --precision=bf16."
        )
    for layer in layers:
        layer.__class__ = Fp8LoraLinear if isinstance(layer, LoraLinear) else Fp8Linear


def _wide_layers(block: nn.Module) -> list[nn.Linear]:
    """Its linear layers that gain from fp8, and those beside them that have as wide an input: it is cast anyway."""
    wide: list[nn.Linear] = []
    for parent in block.modules():
        # no other subclasses: their weight may be read directly, as torch's attention does
        layers = [
            layer
            for layer in parent.children()
            if type(layer) in (nn.Linear, LoraLinear) and isinstance(layer, nn.Linear)
        ]
        fitting = [n for n in layers if not (n.in_features % MULTIPLE or n.out_features % MULTIPLE)]
        widths = {n.in_features for n in fitting if _width(n) >= LEAST_WIDTH}
        wide += [n for n in fitting if n.in_features in widths]
    return wide


def _width(layer: nn.Linear) -> float:
    return layer.in_features * layer.out_features / (layer.in_features + layer.out_features)
