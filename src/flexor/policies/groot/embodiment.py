"""Layers with weights of their own for each kind of robot (embodiment). A batch is of one kind."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class EmbodimentLinear(nn.Module):
    """A linear layer for each embodiment."""

    def __init__(self, embodiments: int, inputs: int, outputs: int):
        super().__init__()
        self.W = nn.Parameter(torch.randn(embodiments, inputs, outputs) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(embodiments, outputs))

    def forward(self, x: Tensor, embodiment: Tensor) -> Tensor:
        """x [B, S, inputs] of robots of one embodiment [1] -> [B, S, outputs]."""
        weight, bias = (table.index_select(0, embodiment)[0] for table in (self.W, self.b))
        return torch.matmul(x, weight) + bias


class EmbodimentMLP(nn.Module):
    def __init__(self, embodiments: int, inputs: int, hidden: int, outputs: int):
        super().__init__()
        self.layer1 = EmbodimentLinear(embodiments, inputs, hidden)
        self.layer2 = EmbodimentLinear(embodiments, hidden, outputs)

    def forward(self, x: Tensor, embodiment: Tensor) -> Tensor:
        return self.layer2(F.relu(self.layer1(x, embodiment)), embodiment)


class ActionTokens(nn.Module):
    """Noisy actions and their time -> tokens."""

    def __init__(self, embodiments: int, actions: int, width: int):
        super().__init__()
        self.width = width
        self.W1 = EmbodimentLinear(embodiments, actions, width)
        self.W2 = EmbodimentLinear(embodiments, 2 * width, width)
        self.W3 = EmbodimentLinear(embodiments, width, width)

    def forward(self, actions: Tensor, time: Tensor, embodiment: Tensor) -> Tensor:
        """Actions [B, H, A] at times [B], which are whole numbers -> [B, H, width]."""
        embedded = self.W1(actions, embodiment)
        times = sines(time, self.width).to(embedded.dtype)[:, None].expand_as(embedded)
        return self.W3(F.silu(self.W2(torch.cat((embedded, times), -1), embodiment)), embodiment)


def sines(time: Tensor, width: int, shift: int = 0, cosines_first: bool = False) -> Tensor:
    """Times [B] -> [B, width]: sines and cosines of frequencies that fall from 1 to about 1 / 10,000."""
    half = width // 2
    number = torch.arange(half, device=time.device, dtype=torch.float32)
    angle = time.float()[:, None] * torch.exp(number * (-math.log(10_000.0) / (half - shift)))
    parts = (angle.cos(), angle.sin()) if cosines_first else (angle.sin(), angle.cos())
    return torch.cat(parts, -1)
