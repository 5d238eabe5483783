"""Camera images for Qwen2.5-VL: resized to whole patches, normalised, and cut into patches.

The size of a camera's images is fixed, so its grid of patches is too. Everything else follows from the grids: it is
computed once on the host, and no step reads a tensor there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flexor.core.errors import ConfigError
from flexor.policies.nn.resize_levels import ResizeLevels

PATCH = 14
MERGE = 2  # neighbouring patches in each direction that become one token
FACTOR = PATCH * MERGE
MEAN = (0.48145466, 0.4578275, 0.40821073)  # of CLIP's training images, as in Qwen's own processor
STD = (0.26862954, 0.26130258, 0.27577711)
MAX_ASPECT_RATIO = 200
# of an image, where nothing else is said: those of the published processors
MIN_PIXELS, MAX_PIXELS = 4 * FACTOR**2, 16384 * FACTOR**2


class ImageGrid(NamedTuple):
    """The patches of an image, in rows and columns."""

    rows: int
    columns: int

    @property
    def patches(self) -> int:
        return self.rows * self.columns

    @property
    def tokens(self) -> int:
        return self.patches // MERGE**2

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the image."""
        return self.rows * PATCH, self.columns * PATCH


def choose_grid(height: int, width: int, min_pixels: int, max_pixels: int, factor: int = FACTOR) -> ImageGrid:
    """The grid of a camera's images: about their shape, in whole tokens, with a number of pixels within the limits.

    `factor`: height and width of a token in pixels.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise ConfigError(
            f"Images of {height} x {width} pixels are too long for Qwen's vision-language models."
        )
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > max_pixels:
        shrink = math.sqrt(height * width / max_pixels) * factor
        rows, columns = max(1, math.floor(height / shrink)), max(1, math.floor(width / shrink))
    elif rows * columns * factor**2 < min_pixels:
        enlarge = math.sqrt(min_pixels / (height * width)) / factor
        rows, columns = math.ceil(height * enlarge), math.ceil(width * enlarge)
    return ImageGrid(rows * MERGE, columns * MERGE)


def normalize_colours(images: Tensor) -> Tensor:
    """[B, 3, H, W]. With numbers instead of tensors: a CUDA graph can't copy tensors from the host."""
    channels = zip(images.unbind(1), MEAN, STD)
    return torch.stack([(channel - mean) / std for channel, mean, std in channels], 1)


def cut_into_patches(images: Tensor, patch: int = PATCH) -> Tensor:
    """Images [B, 3, rows * patch, columns * patch] -> [B, patches, 3 * patch * patch]; the patches of a token are
    neighbours."""
    blocks = [size // (patch * MERGE) for size in images.shape[-2:]]
    split = images.unflatten(3, (blocks[1], MERGE, patch)).unflatten(2, (blocks[0], MERGE, patch))
    # [B, colour, row, row in token, y, column, column in token, x]
    return split.permute(0, 2, 5, 3, 6, 1, 4, 7).flatten(5).flatten(1, 4)


class QwenImages(nn.Module):
    """Images in [0, 1] -> patches. The tables that resize them are computed once: their sizes are fixed."""

    def __init__(self, sizes: Sequence[tuple[int, int]], grids: Sequence[ImageGrid]):
        """`sizes`: height and width of the images of each camera; `grids`: the patches that they become."""
        super().__init__()
        self.resize = nn.ModuleList(
            ResizeLevels(size, grid.size) for size, grid in zip(sizes, grids, strict=True)
        )

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """Images [B, 3, H, W] of each camera -> the patches of all, [B, patches, 3 * 14 * 14]."""
        return torch.cat([self.of_camera(camera, number) for number, camera in enumerate(images)], 1)

    def of_camera(self, images: Tensor, camera: int) -> Tensor:
        """Images [B, 3, H, W] of one camera -> [B, patches, 3 * 14 * 14]."""
        return cut_into_patches(normalize_colours(self.resize[camera](images)))
