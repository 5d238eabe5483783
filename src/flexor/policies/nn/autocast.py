"""What autocast does, for code that prepares its inputs."""

import torch
from torch import Tensor, nn


def autocast_type(x: Tensor) -> torch.dtype:
    """The type in which autocast computes matrix products and convolutions with x; without autocast, that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def lower_weights(network: nn.Module) -> None:
    """Store in bfloat16 what autocast would cast to it at every use: weights of matrix products and convolutions."""
    for part in network.modules():
        if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.ConvTranspose1d):
            for parameter in part.parameters(recurse=False):
                parameter.data = parameter.data.bfloat16()
