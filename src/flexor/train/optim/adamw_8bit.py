"""AdamW with moments of 8 bits. Its state is saved in bitsandbytes' format, as that of any other optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from flexor.kernels import adamw_8bit
from flexor.kernels.adam import factors
from flexor.kernels.available import has_kernels

SMALLEST = 4096  # parameters with fewer values have moments in float32
MOMENTS, SCALES = ("state1", "state2"), ("absmax1", "absmax2")
UNUSED = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}  # of another optimizer of bitsandbytes


class AdamW8bit(torch.optim.Optimizer):
    """Like torch's fused optimizers, it divides gradients by `grad_scale` and skips a step if `found_inf` is not 0.

    A CUDA graph can contain the step where Flexor's kernels can be compiled: nothing is read on the host.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, **UNUSED})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for large in (True, False):
                self._update(group, [p for p in trained if (p.numel() >= SMALLEST) == large])
        return loss

    def _update(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """For weights whose moments have 8 bits, or all 32."""
        if not weights:
            return
        states = [self._state(weight) for weight in weights]
        found_inf = getattr(self, "found_inf", None)
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))
        rows = factors(steps, group["lr"], group["betas"], group["weight_decay"])
        columns = [[s[key] for s in states] if key in states[0] else [] for key in (*MOMENTS, *SCALES)]
        scalars = getattr(self, "grad_scale", None), found_inf, *group["betas"], group["eps"]
        in_kernel = has_kernels(weights[0].device) and all(map(adamw_8bit.has_known_layout, weights))
        update: Callable[..., None] = torch.ops.flexor.adamw_8bit if in_kernel else adamw_8bit.update
        update(weights, [_like(p.grad, p) for p in weights], *columns, rows, *scalars)

    def _state(self, weight: Tensor) -> dict[str, Tensor]:
        """Moments are in rows, whatever the weight's layout in memory is: so are the blocks that share a scale."""
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            large = weight.numel() >= SMALLEST
            state["step"] = torch.zeros((), device=weight.device)
            for moment, scale in zip(MOMENTS, SCALES):
                dtype = torch.uint8 if large else torch.float32
                state[moment] = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
                if large:
                    blocks = -(-weight.numel() // adamw_8bit.BLOCK)
                    state[scale] = torch.zeros(blocks, device=weight.device)
        return state

    def state_dict(self) -> dict[str, Any]:
        """Steps are integers, as in bitsandbytes."""
        saved = super().state_dict()
        states = {i: {**state, "step": state["step"].long()} for i, state in saved["state"].items()}
        return {**saved, "state": states}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """torch's method would cast moments to the dtype of their weight."""
        super().load_state_dict({**saved, "state": {}})
        numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
        weights = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, weight in zip(numbers, weights):
            if state := saved["state"].get(number):
                self.state[weight] = {
                    key: torch.as_tensor(state[key]).to(weight.device).contiguous()
                    for key in ("step", *MOMENTS, *SCALES)
                    if key in state
                }
                self.state[weight]["step"] = self.state[weight]["step"].float()


def _like(gradient: Tensor | None, weight: Tensor) -> Tensor:
    """In the layout of the weight."""
    assert gradient is not None
    if gradient.stride() == weight.stride():
        return gradient
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
