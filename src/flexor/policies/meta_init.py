"""Policies whose parameters take no memory yet. They are filled shard by shard, or never."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from flexor.policies.weight_names import tied_names


@contextlib.contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Modules created inside have parameters on the meta device. Buffers are real, since they hold computed values."""
    register = nn.Module.register_parameter
    replaced = WeakTensorKeyDictionary()  # a tied parameter is registered twice, and replaced by the same one

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            if parameter not in replaced:
                empty = torch.empty_like(parameter, device="meta")
                replaced[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            parameter = replaced[parameter]
        register(module, name, parameter)

    nn.Module.register_parameter = register_empty  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def with_memory(module: nn.Module, device: str | torch.device) -> None:
    """Move a module to a device. Parameters that take no memory get memory there, without values."""
    apply_keeping_ties(module, lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))


def apply_keeping_ties(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change all parameters and buffers, like `module._apply`, which would make two of a weight with two names."""
    ties = tied_names(module)
    state = module.state_dict(keep_vars=True)
    tied = {id(state[name]) for name in ties}
    changed: dict[int, Tensor] = {}

    def change_once(tensor: Tensor) -> Tensor:
        if id(tensor) not in tied:
            return change(tensor)
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor)
        return changed[id(tensor)]

    module._apply(change_once)
    for alias, name in ties.items():
        (owner, _, attribute), (source, _, original) = alias.rpartition("."), name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, getattr(module.get_submodule(source), original))
