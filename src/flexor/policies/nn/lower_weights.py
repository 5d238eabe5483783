"""Weights in bfloat16, as autocast uses them."""

import torch
from torch import nn

from flexor.policies.nn.attention import Attention

CAST = (nn.Linear, nn.modules.conv._ConvNd, Attention)
"""Layers whose own parameters autocast casts at every use."""


def lower_weights(network: nn.Module) -> None:
    """For inference: store in bfloat16 what autocast would cast to it, on a GPU in the layout of its convolutions."""
    for layer in network.modules():
        if isinstance(layer, CAST):
            for parameter in layer.parameters(recurse=False):
                last = parameter.is_cuda and parameter.ndim == 4
                layout = torch.channels_last if last else torch.preserve_format
                parameter.data = parameter.data.to(torch.bfloat16, memory_format=layout)
