"""Camera images as GR00T takes them: resized, cropped, resized again, and cut into patches. All by fixed tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from flexor.policies.nn.resize_levels import ResizeLevels
from flexor.policies.vlm.qwen2_5_images import ImageGrid, choose_grid, cut_into_patches
from flexor.policies.vlm.qwen3_vision import PATCH

TOKEN = 2 * PATCH  # height and width in pixels
MIN_PIXELS, MAX_PIXELS = 256**2, 4096**2  # of an image, as in the published processors


@dataclass(frozen=True)
class ImageGeometry:
    """What happens to images before they are cut into patches, under the names of GR00T's processor."""

    target: tuple[int, int]
    crop: float | None
    """The share of rows and columns that is kept, from the middle."""
    shortest_edge: int | None
    letter_box: bool
    """Make images square with black bars first."""
    min_pixels: int
    max_pixels: int

    def square(self, size: tuple[int, int]) -> tuple[int, int]:
        return (max(size), max(size)) if self.letter_box else size

    def resized(self) -> tuple[int, int]:
        edge = self.shortest_edge or self.target[0]
        return edge, edge

    def cropped(self) -> tuple[int, int]:
        size = self.resized()
        if self.crop is None or not 0 < self.crop < 1:
            return size
        return max(1, round(size[0] * self.crop)), max(1, round(size[1] * self.crop))

    def grid(self, size: tuple[int, int]) -> ImageGrid:
        """The patches of images of this height and width."""
        return choose_grid(*self.target, self.min_pixels, self.max_pixels, TOKEN)


class GrootImages(nn.Module):
    """Images of one camera in [0, 1] -> patches."""

    def __init__(self, size: tuple[int, int], geometry: ImageGeometry):
        """`size`: height and width of the camera's images."""
        super().__init__()
        self.geometry, self.size = geometry, size
        square, resized, cropped = geometry.square(size), geometry.resized(), geometry.cropped()
        grid = geometry.grid(size)
        final = grid.rows * PATCH, grid.columns * PATCH
        self.top, self.left = ((old - new) // 2 for old, new in zip(resized, cropped))
        self.bars = [square[axis] - size[axis] for axis in (0, 1)]
        self.cropped = cropped
        self.resize = ResizeLevels(square, resized, like_torch=True)
        after = [ResizeLevels(cropped, geometry.target, like_torch=True)]
        after += [ResizeLevels(geometry.target, final, like_torch=True)] if final != geometry.target else []
        self.after = nn.ModuleList(after)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, patches, 3 * 16 * 16]."""
        levels = (images.float().clamp(0, 1) * 255).floor() / 255  # bytes, as LeRobot rounds to them
        (above, across) = (bar // 2 for bar in self.bars)
        padding = (across, self.bars[1] - across, above, self.bars[0] - above)
        levels = self.resize(F.pad(levels, padding) if any(padding) else levels)
        height, width = self.cropped
        levels = levels[..., self.top : self.top + height, self.left : self.left + width]
        for resize in self.after:
            levels = resize(levels)
        return cut_into_patches((levels - 0.5) / 0.5, PATCH)


def all_images(sizes: Sequence[tuple[int, int]], geometry: ImageGeometry) -> nn.ModuleList:
    """For each camera."""
    return nn.ModuleList(GrootImages(size, geometry) for size in sizes)
