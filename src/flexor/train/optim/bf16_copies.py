"""bfloat16 copies of the weights, which a step in bf16 mixed precision computes with.

Autocast casts each float32 weight to bfloat16 in every forward pass, and its gradient back to float32. Here the copies
stay from step to step. They are the leaves of the forward pass, so gradients stay in bfloat16. The optimizer reads
these, updates the float32 weights and its state, and writes the new copies, in one pass over them. Values are the same:
autocast rounds the weights as the copies are rounded, and its gradients are bfloat16 before they are cast. Gradients
that were summed over several ranks are float32, and those of the weights.

The policy has its float32 weights all the time, except within a forward pass: no other thread may ask for its
parameters then. Copies are made in the first one, after a checkpoint is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flexor.kernels.adam import complement, factors
from flexor.kernels.available import has_kernels
from flexor.policies.nn.cast_to_bf16 import AUTOCAST_LAYERS
from flexor.policies.weight_names import parameters_only_in

DEVICES = ("cuda", "meta")
LARGE = 1 << 16  # values of a tensor from which on it is worth a kernel launch of its own


class Bf16Copies:
    """Copies of what `optimizer`, torch's Adam or AdamW, trains in linear layers, convolutions and attention."""

    def __init__(self, policy: nn.Module, optimizer: torch.optim.Optimizer):
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        trained &= parameters_only_in(policy, AUTOCAST_LAYERS)
        layers = [module for module in policy.modules() if isinstance(module, AUTOCAST_LAYERS)]
        self.places = [
            (layer, name, weight)
            for layer in layers
            for name, weight in layer.named_parameters(recurse=False)
            if weight in trained and weight.requires_grad and weight.dtype == torch.float32
        ]
        self.copies: dict[nn.Parameter, nn.Parameter] = {}

    def create(self) -> dict[nn.Parameter, nn.Parameter]:
        """The copies, of the weights as they are at the first call."""
        if not self.copies:
            self.copies = {w: nn.Parameter(w.detach().to(torch.bfloat16)) for _, _, w in self.places}
        return self.copies

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, layers compute with the copies."""
        copies = self.create()
        for layer, name, weight in self.places:
            layer._parameters[name] = copies[weight]
        try:
            yield
        finally:
            for layer, name, weight in self.places:
                layer._parameters[name] = weight

    def of(self, weight: nn.Parameter) -> nn.Parameter:
        """The copy of a weight, or the weight itself if it has none."""
        return self.create().get(weight, weight)

    def zero_grad(self) -> None:
        for copy in self.copies.values():
            copy.grad = None

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step. Large weights have Flexor's kernel, all others torch's."""
        small: list[nn.Parameter] = []
        for group in optimizer.param_groups:
            copied = [p for p in group["params"] if p in self.copies and self._gradients([p])]
            large = [p for p in copied if p.numel() >= LARGE and has_kernels(p.device)]
            if large:
                self._update(optimizer, group, large)
            small += [p for p in copied if p.numel() < LARGE or not has_kernels(p.device)]
        cast = [p for p in small if p.grad is None]
        gradients = [torch.empty_like(p) for p in cast]  # in float32
        if cast:
            torch._foreach_copy_(gradients, self._gradients(cast))
        for weight, gradient in zip(cast, gradients):
            weight.grad = gradient
        optimizer.step()
        if small:
            torch._foreach_copy_([self.copies[p] for p in small], [*small])

    def _gradients(self, weights: list[nn.Parameter]) -> list[Tensor]:
        """Those of the weights, or of their copies."""
        leaves = [self.copies[weight] if weight.grad is None else weight for weight in weights]
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    def _update(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], weights: list[nn.Parameter]
    ) -> None:
        """Adam, or AdamW, for some weights of a group."""
        states = [_state(optimizer, weight) for weight in weights]
        steps, averages, squares = ([s[key] for s in states] for key in ("step", "exp_avg", "exp_avg_sq"))
        torch._foreach_add_(steps, 1)
        decoupled = isinstance(optimizer, torch.optim.AdamW)  # weight decay is no part of the gradient
        gradients, copies = self._gradients(weights), [self.copies[w] for w in weights]
        torch.ops.flexor.adam_with_copies(
            *(weights, gradients, averages, squares, copies),
            factors(steps, group["lr"], group["betas"], group["weight_decay"] if decoupled else 0.0),
            getattr(optimizer, "grad_scale", None),
            *(complement(beta) for beta in group["betas"]),
            group["eps"],
            0.0 if decoupled else group["weight_decay"],
        )
        for weight in weights:
            weight.grad = None  # so that torch does not update it again


def _state(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> dict[str, Tensor]:
    """The optimizer's state of a weight, made in its first step as torch makes it."""
    state: dict[str, Tensor] = optimizer.state[weight]
    if not state:
        state["step"] = torch.zeros((), device=weight.device)
        state["exp_avg"] = torch.zeros_like(weight)
        state["exp_avg_sq"] = torch.zeros_like(weight)
    return state
