"""Camera images for WALL-X: their longer side becomes 256 pixels, then whole patches of Qwen2.5-VL.

Each step rounds to a byte. LeRobot does the same on a GPU; on a CPU its bytes may differ by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.core.errors import ConfigError
from flexor.policies.vlm.qwen2_5_images import (
    FACTOR,
    MAX_PIXELS,
    MIN_PIXELS,
    ImageGrid,
    choose_grid,
    cut_into_patches,
    normalize_colours,
)

LONGER_SIDE = 256


def reduced_size(height: int, width: int) -> tuple[int, int]:
    """Height and width after the first step."""
    if width > height:
        return int(LONGER_SIDE * height / width), LONGER_SIDE
    return LONGER_SIDE, int(LONGER_SIDE * width / height)


def grid_of(height: int, width: int) -> ImageGrid:
    """The patches that an image becomes."""
    reduced = reduced_size(height, width)
    if min(reduced) <= FACTOR // 2:
        raise ConfigError(
            f"Images of {height} x {width} pixels are too long for WALL-X: at {LONGER_SIDE} pixels, their shorter "
            f"side would have {min(reduced)}. Crop them."
        )
    return choose_grid(*reduced, MIN_PIXELS, MAX_PIXELS)


class WallXImages(nn.Module):
    """Images in [0, 1] -> patches."""

    def __init__(self, grids: Sequence[ImageGrid]):
        """The patches of each camera's images."""
        super().__init__()
        self.grids = list(grids)

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """Images [B, 3, H, W] of each camera -> the patches of all, [B, patches, 3 * 14 * 14]."""
        return torch.cat([self.of_camera(camera, number) for number, camera in enumerate(images)], 1)

    def of_camera(self, images: Tensor, camera: int) -> Tensor:
        """Images [B, 3, H, W] of one camera -> [B, patches, 3 * 14 * 14]."""
        levels = (images.float() * 255).clamp(0, 255).trunc()
        levels = resize(levels, reduced_size(*images.shape[-2:]))
        levels = resize(levels, self.grids[camera].size)
        return cut_into_patches(normalize_colours(levels / 255))


def resize(levels: Tensor, size: tuple[int, int]) -> Tensor:
    """Images of whole numbers from 0 to 255, bicubic, rounded again."""
    if tuple(levels.shape[-2:]) == size:
        return levels
    resized = F.interpolate(levels, size, mode="bicubic", align_corners=False, antialias=True)
    return resized.clamp(0, 255).round()
