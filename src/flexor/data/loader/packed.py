"""The small tensors of a batch in one piece of pinned memory: one transfer to the GPU instead of a dozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNED = 256  # bytes; tensors start where the GPU's allocator could have put them


@dataclass(eq=False)
class Packed:
    """Tensors by name, one after the other in `memory`, uint8 [n]."""

    memory: Tensor
    layout: dict[str, tuple[int, torch.dtype, tuple[int, ...]]]  # first byte, type, shape

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """The tensors on a device. They share one piece of memory."""
        memory = self.memory.to(device, non_blocking=True)
        typed = {dtype: memory.view(dtype) for _, dtype, _ in self.layout.values()}
        return {
            name: typed[dtype].as_strided(shape, _strides(shape), first // dtype.itemsize)
            for name, (first, dtype, shape) in self.layout.items()
        }


def pack(tensors: Mapping[str, Tensor], pin_memory: bool = True) -> Packed:
    """Copy tensors into one piece of memory."""
    layout, total = {}, 0
    for name, tensor in tensors.items():
        layout[name] = (total, tensor.dtype, tuple(tensor.shape))
        total += -(-tensor.nbytes // ALIGNED) * ALIGNED
    memory = torch.empty(total, dtype=torch.uint8, pin_memory=pin_memory)
    for name, tensor in tensors.items():
        first = layout[name][0]
        memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return Packed(memory, layout)


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return strides
