"""The same functions for plain and sharded tensors: get this rank's part, copy between them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import torch
from safetensors import safe_open
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# safetensors' names of types
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor. Avoids the slow import (seconds): before that import no DTensor can exist."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def make_contiguous(model: nn.Module) -> None:
    """Give each parameter the usual memory layout: what cuts parameters into pieces requires it."""
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def as_part(local_part: Tensor, template: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
    """Wrap `local_part` as this rank's part of a tensor sharded like `template`, on `mesh` or the template's mesh."""
    if not is_sharded(template):
        return local_part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local_part,
        mesh or template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=torch.empty(template.shape, device="meta").stride(),
    )


def part(tensor: Tensor) -> slice:
    """The rows of the whole tensor on this rank; FSDP splits along the first dimension, like `torch.chunk`."""
    rows = len(tensor) if tensor.ndim else 0
    if not is_sharded(tensor):
        return slice(0, rows)
    start, stop = 0, rows
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_shard():
            assert placement.is_shard(0) and (start, stop) == (0, rows)
            size = -(-rows // tensor.device_mesh.size(dimension))
            index = tensor.device_mesh.get_local_rank(dimension)
            start, stop = min(index * size, rows), min((index + 1) * size, rows)
    return slice(start, stop)


@torch.no_grad()
def copy_part(target: Tensor, full: Tensor) -> None:
    """Copy this rank's part of `full` into `target`."""
    local(target).copy_(full[part(target)] if is_sharded(target) else full)


def fill(tensors: Mapping[str, Tensor], file: Path, names: Mapping[str, str] | None = None) -> None:
    """Fill this rank's part of each tensor from a safetensors file; only that part is read.

    `names` maps each tensor to its name in the file; without it, the names are the same.
    """
    with safe_open(file, "pt") as source, torch.no_grad():
        for name, target in tensors.items():
            stored_name = names[name] if names else name
            if is_sharded(target):
                local(target).copy_(source.get_slice(stored_name)[part(target)])
            else:
                target.copy_(source.get_tensor(stored_name))


def described_in(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file as meta tensors: shapes and types, no memory."""
    with safe_open(file, "pt") as source:
        slices = {name: source.get_slice(name) for name in source.keys()}  # noqa: SIM118
        return {
            name: torch.empty(stored.get_shape(), dtype=DTYPES[stored.get_dtype()], device="meta")
            for name, stored in slices.items()
        }
