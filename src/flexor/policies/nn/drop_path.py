"""Stochastic depth (Huang et al. 2016, https://arxiv.org/abs/1603.09382): training leaves branches out at random."""

from __future__ import annotations

import torch
from torch import Tensor


def drop_path(branch: Tensor, rate: float, training: bool) -> Tensor:
    """`branch` [N, ...] with zeros for a share of `rate` of its samples, and the others scaled to keep the mean."""
    if rate == 0.0 or not training:
        return branch
    shape = (len(branch), *[1] * (branch.ndim - 1))
    remains = torch.rand(shape, device=branch.device) >= rate
    return branch * (remains.to(branch.dtype) / (1 - rate))
