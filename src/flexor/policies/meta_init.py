"""Policies whose parameters take no memory yet. They are filled shard by shard, or never."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Modules created inside have parameters on the meta device. Buffers are real, since they hold computed values."""
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            empty = torch.empty_like(parameter, device="meta")
            parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_empty  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def with_memory(module: nn.Module, device: str | torch.device) -> None:
    """Move a module to a device. Parameters that take no memory get memory there, without values."""
    module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
