"""Camera images as policies on vision-language models take them.

Robots have different cameras: those that a batch lacks are left out, and a mask hides an image that a sample lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexor.core.batch import IMAGE_FEATURES, Batch
from flexor.core.errors import FlexorError
from flexor.policies.nn.resize import Where, resize_with_padding


class CameraImages(NamedTuple):
    """The images of each camera that a batch has, or what the model's encoder has made of them."""

    images: list[Tensor]  # [B, 3, H, W], in -1..1 unless a processing step normalises; if encoded, [B, ...]
    masks: list[Tensor | None]  # [B], False where a sample lacks the image; None: all samples have it
    encoded: bool = False

    def stacked(self) -> Tensor:
        """[B, N, 3, H, W]; if they are encoded, [B, N, ...]."""
        return torch.stack(self.images, dim=1)

    def stacked_masks(self) -> Tensor | None:
        """[B, N]; None if every sample has all images."""
        if all(mask is None for mask in self.masks):
            return None
        full = torch.ones(len(self.images[0]), dtype=torch.bool, device=self.images[0].device)
        return torch.stack([full if mask is None else mask.bool() for mask in self.masks], dim=1)


def prepare_cameras(
    policy: str,
    cameras: Sequence[str],
    batch: Batch,
    size: tuple[int, int] | None,
    padding: Where,
    normalized: bool = False,
) -> CameraImages:
    """The images of the cameras in the batch, resized without distortion to `size` (height, width); None: as they are.

    `policy` is named in the error if the batch has none of the cameras. `normalized`: a processing step has done it.
    """
    encoded = any(f"{IMAGE_FEATURES}{camera}" in batch for camera in cameras)
    names = {camera: f"{IMAGE_FEATURES}{camera}" if encoded else camera for camera in cameras}
    present = [camera for camera in cameras if names[camera] in batch]
    if not present:
        raise FlexorError(
            f"{policy} needs at least one of its cameras ({', '.join(cameras)}), but the batch has only "
            f"{', '.join(batch)}."
        )
    images = [batch[names[camera]] for camera in present]
    if not encoded:
        images = [prepare_images(pixels, size, padding, normalized) for pixels in images]
    return CameraImages(images, [batch.get(f"{camera}_padding_mask") for camera in present], encoded)


def prepare_images(
    images: Tensor, size: tuple[int, int] | None, padding: Where, normalized: bool = False
) -> Tensor:
    """Images of one camera [B, 3, H, W] in 0..1, in `size` and in -1..1, unless a processing step normalises them."""
    resized = images if size is None else resize_with_padding(images, *size, padding)
    return resized if normalized else resized * 2 - 1
