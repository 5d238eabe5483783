"""Frozen weights in bfloat16, for training in bf16 mixed precision.

Autocast rounds the weights of linear layers, convolutions and attention to bfloat16 at every use, and some policies
round embeddings. A frozen weight never changes. So it is rounded once, takes half the GPU memory, and the step computes
the same. Checkpoints need its float32 values: the process that writes them has these in host memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flexor.policies.base import Policy
from flexor.policies.nn.cast_to_bf16 import AUTOCAST_LAYERS
from flexor.policies.nn.transformer import TokenEmbedding, fix_residual_dtypes
from flexor.policies.quantized import QuantizedLinear
from flexor.policies.weight_names import parameters_only_in, unique_parameters, unique_state


def store_frozen_in_bf16(policy: Policy, keep_float32: bool, host: str = "cpu") -> None:
    """From here on, the policy computes only under autocast to bfloat16.

    `keep_float32`: also keep the float32 values, in `policy.float32_weights`, on the device `host`.
    """
    fix_residual_dtypes(policy)
    for name, parameter in _castable_weights(policy).items():
        weight = parameter.detach()
        layer = _layer_of(policy, name)
        if isinstance(layer, TokenEmbedding):
            layer.has_scaled_weight = True
        if keep_float32 or isinstance(layer, TokenEmbedding):  # a rounded embedding can't be scaled exactly
            on_host = weight.device.type == host
            policy.float32_weights[name] = weight if on_host else torch.empty_like(weight, device=host)
        parameter.data = _as_computed(layer, weight).bfloat16()


def float32_state(policy: Policy) -> dict[str, Tensor]:
    """`unique_state`, with the original values of weights that are stored in bfloat16, 8 or 4 bits."""
    return unique_state(policy) | policy.float32_weights


def round_frozen(policy: Policy) -> None:
    """After `float32_state` was filled: the same values as the policy stores them."""
    for name, weight in policy.float32_weights.items():
        layer = _layer_of(policy, name)
        if isinstance(layer, QuantizedLinear):
            layer.load_original(weight)
        else:
            policy.get_parameter(name).data.copy_(_as_computed(layer, weight))


def _castable_weights(policy: Policy) -> dict[str, nn.Parameter]:
    """The frozen float32 weights that are rounded at every use, by name."""
    castable = parameters_only_in(policy, AUTOCAST_LAYERS)
    for layer in policy.modules():
        if isinstance(layer, TokenEmbedding) and layer.rounds_output:
            castable |= {*layer.parameters()}
    return {
        name: parameter
        for name, parameter in unique_parameters(policy).items()
        if parameter in castable and not parameter.requires_grad and parameter.dtype == torch.float32
    }


def _layer_of(policy: Policy, name: str) -> nn.Module:
    return policy.get_submodule(name.rpartition(".")[0])


def _as_computed(layer: nn.Module, weight: Tensor) -> Tensor:
    """The weight as the layer computes with it, before it is rounded."""
    return weight * layer.scale if isinstance(layer, TokenEmbedding) else weight
