"""Images of bytes -> floats by a table: a byte has 256 levels, so any map of single values is a table of 256 values.

The Triton kernel of `triton/level_table.py` reads each byte and writes its float, in one pass over the images. The
values are those of the table, bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexor.kernels.available import has_kernels
from flexor.kernels.operator import define_operator

LEVELS = 256

define_operator(
    "look_up_levels",
    "(Tensor images, Tensor table) -> Tensor",
    lambda images, table: torch.empty_like(images, dtype=table.dtype),
    "level_table",
)


def can_look_up(images: Tensor) -> bool:
    """Whether the kernel can be used."""
    return images.is_contiguous() and has_kernels(images.device)


def look_up(images: Tensor, table: Tensor) -> Tensor:
    """Images uint8 [..., C, H, W] and a table [C, 256] -> [..., C, H, W] in the type of the table."""
    return torch.ops.flexor.look_up_levels(images, table)


def all_levels(channels: int, device: torch.device) -> Tensor:
    """One image of one pixel per level: uint8 [256, C, 1, 1]."""
    return torch.arange(LEVELS, device=device).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, channels, 1, 1)


def as_table(values: Tensor) -> Tensor:
    """The table of what a pipeline computed from `all_levels`: [256, C, 1, 1] -> [C, 256]."""
    return values.flatten(1).T.contiguous()
