"""Adam in one pass over weights, gradients, both averages and the bfloat16 copies of the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from flexor.kernels.operator import define_operator

define_operator(
    "adam_with_copies",
    "(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] averages, Tensor(c!)[] squares, Tensor(d!)[] copies, "
    "Tensor factors, Tensor? scale, float one_minus_beta1, float one_minus_beta2, "
    "float eps, float decay) -> ()",
    lambda *_: None,
    "adam",
)


def factors(
    steps: list[Tensor], lr: float | Tensor, betas: tuple[float, float], weight_decay: float
) -> Tensor:
    """What a kernel needs after these steps [N, 3]: bias-corrected step size, root of the second bias correction, and
    1 - lr * weight decay. In float64: 1 - 0.999 has few digits in float32.
    """
    done = torch.stack(steps).double()
    rate = lr / (1 - betas[0] ** done)
    root = (1 - betas[1] ** done).sqrt()
    decay = torch.ones_like(done) - lr * weight_decay
    return torch.stack((rate, root, decay), 1).float()


def complement(beta: float) -> float:
    """1 - beta in float32, as torch's fused kernel has it: of 0.999, five digits are those of the exact value."""
    return float(1 - torch.tensor(beta, dtype=torch.float32))
