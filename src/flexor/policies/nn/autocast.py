"""What autocast does, for code that prepares its inputs."""

import torch
from torch import Tensor


def autocast_type(x: Tensor) -> torch.dtype:
    """The type in which autocast computes matrix products and convolutions with x; without autocast, that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
