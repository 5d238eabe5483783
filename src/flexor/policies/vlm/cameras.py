"""Camera images as policies on vision-language models take them.

Robots have different cameras: those that a batch lacks are left out, and a mask hides an image that a sample lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexor.core.batch import Batch
from flexor.core.errors import FlexorError
from flexor.policies.nn.resize import Where, resize_with_padding


class CameraImages(NamedTuple):
    """The images of each camera that a batch has."""

    images: list[Tensor]  # [B, 3, H, W]; in -1..1 unless they are normalised otherwise
    masks: list[Tensor | None]  # [B], False where a sample lacks the image; None: all samples have it

    def stacked(self) -> Tensor:
        """[B, N, 3, H, W]."""
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
    present = [camera for camera in cameras if camera in batch]
    if not present:
        raise FlexorError(
            f"{policy} needs at least one of its cameras ({', '.join(cameras)}), but the batch has only "
            f"{', '.join(batch)}."
        )
    resized = [
        batch[name] if size is None else resize_with_padding(batch[name], *size, padding) for name in present
    ]
    masks = [batch.get(f"{camera}_padding_mask") for camera in present]
    return CameraImages(resized if normalized else [images * 2 - 1 for images in resized], masks)
