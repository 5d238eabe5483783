"""Resizing images to a fixed size without distorting them, as vision-language models require."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Where = Literal["centre", "left-top"]


def resize_with_padding(
    images: Tensor, height: int, width: int, where: Where = "centre", fill: float = 0.0
) -> Tensor:
    """Images [..., C, H, W] in [0, 1] -> [..., C, height, width], bilinear, the free border filled with `fill`.

    "centre" puts an image in the middle, as pi0 and its relatives do; "left-top" puts the border at its left and top,
    as SmolVLA does. Pixels are LeRobot's: no antialiasing, and "centre" also limits them to [0, 1].
    """
    input_height, input_width = images.shape[-2:]
    if (input_height, input_width) == (height, width):
        return images
    ratio = max(input_width / width, input_height / height)
    resized = max(1, int(input_height / ratio)), max(1, int(input_width / ratio))
    flat = images.flatten(0, -4) if images.dim() > 3 else images[None]  # [N, C, H, W]
    small = F.interpolate(flat, resized, mode="bilinear", align_corners=False)
    if where == "centre":
        small = small.clamp(0, 1)
    top, left = height - resized[0], width - resized[1]
    if where == "centre":
        top, left = top // 2, left // 2
    right, bottom = width - resized[1] - left, height - resized[0] - top
    padded = F.pad(small, (left, right, top, bottom), value=fill)
    return padded.reshape(*images.shape[:-2], height, width)


def padded(vectors: Tensor, size: int) -> Tensor:
    """Vectors [..., n] with zeros at their end, [..., size]."""
    return F.pad(vectors, (0, size - vectors.shape[-1]))
