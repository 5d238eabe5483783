"""SGD whose momentum exists before its first step, so that steps are alike: a CUDA graph and a skipped step need it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SGD(torch.optim.SGD):
    """torch's SGD makes the momentum in the first step, from the gradient. Zeros become the same in that step.

    If an overflow skips the first step (fp16), torch's fused kernel leaves memory without values, and uses it next.
    Parameters that get their first gradient later than others of their group are an error there.
    """

    def _init_group(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], buffers: list[Tensor | None]
    ) -> bool:
        if group["momentum"] != 0:
            for parameter in group["params"]:
                state = self.state[parameter] if parameter.grad is not None else None
                if state is not None and state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
        sparse: bool = super()._init_group(group, params, grads, buffers)
        return sparse
