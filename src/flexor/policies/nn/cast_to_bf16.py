"""Weights in bfloat16, as autocast uses them."""

import torch
from torch import nn

from flexor.policies.nn.attention import Attention

AUTOCAST_LAYERS = (nn.Linear, nn.modules.conv._ConvNd, Attention)
"""Layers whose own parameters autocast casts at every use."""


def cast_to_bf16(network: nn.Module) -> None:
    """For inference: store weights in bfloat16 that autocast would cast at every use, on a GPU channels-last."""
    for layer in network.modules():
        if isinstance(layer, AUTOCAST_LAYERS):
            for parameter in layer.parameters(recurse=False):
                is_image_kernel = parameter.is_cuda and parameter.ndim == 4
                layout = torch.channels_last if is_image_kernel else torch.preserve_format
                parameter.data = parameter.data.to(torch.bfloat16, memory_format=layout)
