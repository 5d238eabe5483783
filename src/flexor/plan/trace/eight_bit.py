"""A model of bitsandbytes' 8-bit AdamW: its memory and memory traffic. Planning does not require bitsandbytes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flexor.plan.trace import kernels  # noqa: F401  defines the kernel

BLOCK = 256  # values that share a scale; also the number of values of a byte
SMALLEST = 4096  # parameters with fewer values have moments in float32


class AdamW8bitOnMeta(torch.optim.Optimizer):
    """As in bitsandbytes, the state is made at the first step, and each parameter has its own kernel call."""

    def __init__(self, groups: Any, **settings: Any):
        super().__init__(groups, settings)
        self.tables: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            if not state:
                state |= self._moments(parameter)
            torch.ops.flexor_plan._fused_adamw_8bit_([parameter], [parameter.grad], list(state.values()))

    def _moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if parameter.numel() < SMALLEST:
            return {f"state{i}": torch.zeros_like(parameter, dtype=torch.float32) for i in (1, 2)}
        exact = partial(torch.zeros, dtype=torch.float32, device=parameter.device)
        if not self.tables:
            self.tables = [exact(BLOCK), exact(BLOCK)]
        blocks = -(-parameter.numel() // BLOCK)
        moments = {f"state{i}": torch.zeros_like(parameter, dtype=torch.uint8) for i in (1, 2)}
        return moments | {f"absmax{i}": exact(blocks) for i in (1, 2)}
