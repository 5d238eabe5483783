"""Batch normalisation with statistics over the batches of all ranks.

With plain batch normalisation, a sample's loss depends on which samples are on the same *rank*. Here ranks
add up their sums first, so loss, gradients and running statistics are the same on one GPU and on eight. That
costs one small reduction per layer. Under gradient accumulation the statistics are still those of a
micro-batch; where that matters, use group normalisation instead.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce


def recomputing() -> bool:
    """Whether a backward pass is running: activation checkpointing recomputes the forward pass in it."""
    return torch._C._current_graph_task_id() != -1


class BatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` over all ranks. Counts a batch once, even if its forward pass is recomputed."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float

    def forward(self, x: Tensor) -> Tensor:  # [B, C, H, W]
        # sharded parameters may be bfloat16, which the kernels do not mix with float32 statistics
        mean, var = self.running_mean, self.running_var
        weight, bias = self.weight.to(mean.dtype), self.bias.to(mean.dtype)
        if not self.training:
            return F.batch_norm(x, mean, var, weight, bias, eps=self.eps)
        if recomputing():
            mean, var = mean.clone(), var.clone()
        else:
            self.num_batches_tracked.add_(1)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return self._over_ranks(x, mean, var, weight, bias)
        return F.batch_norm(x, mean, var, weight, bias, True, self.momentum, self.eps)

    def _over_ranks(self, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        wide, channels = x.to(mean.dtype), x.shape[1]
        local_count = wide.new_full((1,), x.numel() / channels)
        sums = all_reduce(torch.cat((wide.sum((0, 2, 3)), wide.square().sum((0, 2, 3)), local_count)))
        total, squares, count = sums.split([channels, channels, 1])
        batch_mean = total / count
        batch_var = (squares / count - batch_mean.square()).clamp(min=0)
        with torch.no_grad():
            mean.lerp_(batch_mean, self.momentum)
            var.lerp_(batch_var * count / (count - 1).clamp(min=1), self.momentum)
        scale = weight * (batch_var + self.eps).rsqrt()
        shift = bias - batch_mean * scale
        return torch.addcmul(shift.view(1, -1, 1, 1), wide, scale.view(1, -1, 1, 1)).to(x.dtype)
