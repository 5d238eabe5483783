"""Operators for image augmentation: each applies one operation to every image, in one pass.

Which operation an image gets is read on the GPU. `policies/augment/plain.py` computes the same in torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexor.kernels.operator import define_operator

SUM_BLOCK = 4096  # pixels that a program sums up


def parts_of(images: Tensor) -> int:
    """The number of partial sums per image."""
    return -(-images.shape[-2] * images.shape[-1] // SUM_BLOCK)


def _floats(images: Tensor, *_: object) -> Tensor:
    return torch.empty_like(images, dtype=torch.float32)


# images [B, T, C, H, W], bytes or floats in [0, 1]; ops [B, cameras, slots]; numbers [B, cameras, slots, n];
# reach: of the largest blur, in pixels from its centre
define_operator(
    "augment_gray_sums",  # of the images that change their contrast, in parts
    "(Tensor images, Tensor ops, int camera, int slot) -> Tensor",
    lambda images, *_: images.new_empty(*images.shape[:2], parts_of(images), dtype=torch.float32),
    "augment",
)
define_operator(
    "augment_blur_rows",  # the images that are blurred, blurred along their rows
    "(Tensor images, Tensor ops, Tensor numbers, int camera, int slot, int reach) -> Tensor",
    _floats,
    "augment",
)
define_operator(
    "augment_slot",
    "(Tensor images, Tensor ops, Tensor numbers, Tensor? seeds, Tensor? sums, Tensor? rows, int camera, int slot, "
    "int reach) -> Tensor",
    _floats,
    "augment",
)
