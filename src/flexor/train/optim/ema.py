"""The moving average (EMA) of the weights."""

from __future__ import annotations

import torch
from torch import nn

from flexor.core.tensors import local


class EMA:
    """An exponential moving average of a model's floating-point state, in float32: bfloat16 would lose updates."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.updates = 0
        self.average = {k: _exact(v.detach()).clone() for k, v in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))  # forget the start quickly
        averages, values = [], []
        state = model.state_dict(keep_vars=True)  # not detached: detaching takes longer than the rest
        for name, value in state.items():
            if value.is_floating_point():
                averages.append(local(self.average[name]))
                values.append(_exact(local(value)))
            else:
                self.average[name].copy_(value)
        torch._foreach_lerp_(averages, values, 1 - decay)


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
