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
    layout: dict[
        str, tuple[int, torch.dtype, torch.Size, tuple[int, ...]]
    ]  # first byte, type, shape, strides

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """The tensors on a device. They share one piece of memory."""
        memory = self.memory.to(device, non_blocking=True)
        typed = {dtype: memory.view(dtype) for _, dtype, *_ in self.layout.values()}
        return {
            name: typed[dtype].as_strided(shape, strides, first // dtype.itemsize)
            for name, (first, dtype, shape, strides) in self.layout.items()
        }


def pack(tensors: Mapping[str, Tensor], pin_memory: bool = True) -> Packed:
    """Copy tensors into one piece of memory."""
    sizes = [-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors.values()]
    memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pin_memory)
    layout, first = {}, 0
    for (name, tensor), size in zip(tensors.items(), sizes):
        copy = memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        layout[name] = (first, tensor.dtype, tensor.shape, copy.stride())
        first += size
    return Packed(memory, layout)
