"""The moving average (EMA) of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flexor.core.tensors import local
from flexor.policies.weight_names import unique_state


class EMA:
    """An exponential moving average of a model's floating-point state, in float32: bfloat16 would lose updates.

    A step first calls `begin_step`, then `update`. The second can be part of a CUDA graph.
    """

    def __init__(self, model: nn.Module, decay_at: Callable[[int], float]):
        self.decay_at = decay_at  # of the update with this number, counted from 1
        self.updates = 0
        self.average = {k: _in_float32(v.detach()).clone() for k, v in unique_state(model).items()}
        self.weight: float | torch.Tensor = 0.0  # of the model in this step; on a GPU a tensor
        device = next(iter(self.average.values())).device
        if device.type in ("cuda", "meta"):
            self.weight = torch.zeros((), device=device)

    def begin_step(self) -> None:
        self.updates += 1
        decay = self.decay_at(self.updates)
        if isinstance(self.weight, torch.Tensor):
            self.weight.fill_(1 - decay)
        else:
            self.weight = 1 - decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards the model by the weight of this step."""
        averages, values = [], []
        state = model.state_dict(keep_vars=True)  # not detached: detaching takes longer than the rest
        for name in self.average:
            value = state[name]
            if value.is_floating_point():
                averages.append(local(self.average[name]))
                values.append(_in_float32(local(value)))
            else:
                self.average[name].copy_(value)
        if isinstance(self.weight, torch.Tensor):
            _move(averages, values, self.weight)
        else:
            torch._foreach_lerp_(averages, values, self.weight)


def _move(averages: list[torch.Tensor], values: list[torch.Tensor], weight: torch.Tensor) -> None:
    """averages += weight * (values - averages), for many tensors at once and a weight on the GPU.

    No such operation of torch takes the weight as a tensor, except for the step of SGD: the gradient is -values, and
    the weight decay of 1 adds the averages.
    """
    settings: dict[str, Any] = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "is_first_step": False}
    torch._fused_sgd_(averages, values, [], lr=weight, weight_decay=1.0, maximize=True, **settings)


def _in_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
