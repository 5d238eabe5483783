"""Camera images as GR00T takes them: resized, cropped, resized again, and cut into patches. All by fixed tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.core.errors import ConfigError
from flexor.policies.nn.resize_area import ResizeArea
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
    keeps_shape: bool = False
    """Average areas and keep the shape of images, instead of making them square."""

    def square(self, size: tuple[int, int]) -> tuple[int, int]:
        return (max(size), max(size)) if self.letter_box else size

    @property
    def resizer(self) -> Callable[[tuple[int, int], tuple[int, int]], nn.Module]:
        return ResizeArea if self.keeps_shape else partial(ResizeLevels, like_torch=True)

    def resized(self, size: tuple[int, int]) -> tuple[int, int]:
        """After the first resizing."""
        edge = self.shortest_edge or self.target[0]
        if not self.keeps_shape:
            return edge, edge
        scale = edge / min(size)
        return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))

    def cropped(self, size: tuple[int, int]) -> tuple[int, int]:
        if self.crop is None or not 0 < self.crop < 1:
            return size
        rounded: Callable[[float], int] = int if self.keeps_shape else round
        return max(1, rounded(size[0] * self.crop)), max(1, rounded(size[1] * self.crop))

    def sizes(self, size: tuple[int, int]) -> list[tuple[int, int]]:
        """Heights and widths of images: square, resized, cropped, and enlarged again."""
        square = self.square(size)
        resized = self.resized(square)
        cropped = self.cropped(resized)
        return [square, resized, cropped, self.resized(cropped) if self.keeps_shape else self.target]

    def grid(self, size: tuple[int, int]) -> ImageGrid:
        """The patches of images of this height and width."""
        return choose_grid(*self.sizes(size)[-1], self.min_pixels, self.max_pixels, TOKEN)


class GrootImages(nn.Module):
    """Images of one camera in [0, 1] -> patches."""

    def __init__(self, size: tuple[int, int], geometry: ImageGeometry):
        """`size`: height and width of the camera's images."""
        super().__init__()
        self.geometry, self.size = geometry, size
        square, resized, cropped, target = geometry.sizes(size)
        grid = geometry.grid(size)
        final = grid.rows * PATCH, grid.columns * PATCH
        self.top, self.left = ((old - new) // 2 for old, new in zip(resized, cropped))
        self.bars = [square[axis] - size[axis] for axis in (0, 1)]
        self.cropped = cropped
        self.resize = geometry.resizer(square, resized)
        last = [ResizeLevels(target, final, like_torch=True)] if final != target else []
        self.after = nn.ModuleList([geometry.resizer(cropped, target), *last])

    def forward(self, images: Tensor, position: Tensor | None = None) -> Tensor:
        """[B, 3, H, W] -> [B, patches, 3 * 16 * 16].

        `position` [B, 2]: where the part that is kept begins, as shares of what is cut off; None: in the middle.
        """
        levels = (images.float().clamp(0, 1) * 255).floor() / 255  # bytes, as LeRobot rounds to them
        (above, across) = (bar // 2 for bar in self.bars)
        padding = (across, self.bars[1] - across, above, self.bars[0] - above)
        levels = self.resize(F.pad(levels, padding) if any(padding) else levels)
        height, width = self.cropped
        if position is None:
            levels = levels[..., self.top : self.top + height, self.left : self.left + width]
        else:
            levels = crop_at(levels, position, height, width)
        for resize in self.after:
            levels = resize(levels)
        return cut_into_patches((levels - 0.5) / 0.5, PATCH)


def crop_at(images: Tensor, position: Tensor, height: int, width: int) -> Tensor:
    """Images [B, 3, H, W] -> [B, 3, height, width], from another place in each."""
    spare = (images.shape[-2] - height, images.shape[-1] - width)
    starts = [(position[:, axis] * spare[axis]).round().long() for axis in (0, 1)]
    rows = starts[0][:, None] + torch.arange(height, device=images.device)
    columns = starts[1][:, None] + torch.arange(width, device=images.device)
    kept_rows = images.gather(2, rows[:, None, :, None].expand(-1, 3, -1, images.shape[-1]))
    return kept_rows.gather(3, columns[:, None, None].expand(-1, 3, height, -1))


def all_images(sizes: Sequence[tuple[int, int]], geometry: ImageGeometry) -> nn.ModuleList:
    """For each camera."""
    return nn.ModuleList(GrootImages(size, geometry) for size in sizes)


@dataclass
class ImageSettings:
    """Settings of a policy: what happens to images. LeRobot has them in a step of the processing."""

    image_target_size: tuple[int, int] = (256, 256)
    """Height and width that images are resized to. A token has 32 x 32 pixels."""
    image_crop_size: tuple[int, int] | None = (230, 230)
    """Of this height and width is the middle of an image that is kept, before it is enlarged again."""
    shortest_image_edge: int | None = None
    """Height and width before the crop; default: those of policy.image_target_size."""
    crop_fraction: float | None = None
    """The share of rows and columns that is kept, instead of policy.image_crop_size."""
    use_albumentations: bool = False
    """Resize images by averaging areas, keeping their shape, as NVIDIA does."""
    random_crop: bool | None = None
    """In training, keep a random part of each image instead of the middle; default: if policy.use_albumentations."""
    letter_box_transform: bool = False
    """Make images square with black bars first."""
    image_min_pixels: int = MIN_PIXELS
    """Smaller images are enlarged to this number of pixels."""
    image_max_pixels: int = MAX_PIXELS
    """Larger images are reduced to this number of pixels."""

    def check_geometry(self) -> None:
        if min(self.image_target_size) < 1:
            raise ConfigError(
                f"policy.image_target_size={list(self.image_target_size)} must be at least 1 by 1."
            )
        if self.crop_fraction is not None and not 0 < self.crop_fraction <= 1:
            raise ConfigError(f"policy.crop_fraction={self.crop_fraction} must be more than 0 and at most 1.")
        if not TOKEN**2 <= self.image_min_pixels <= self.image_max_pixels:
            raise ConfigError(
                f"policy.image_min_pixels={self.image_min_pixels} must be from {TOKEN**2}, the pixels of a token, to "
                f"policy.image_max_pixels={self.image_max_pixels}."
            )

    @property
    def geometry(self) -> ImageGeometry:
        crop = self.crop_fraction
        if crop is None and self.image_crop_size is not None:
            crop = self.image_crop_size[0] / self.image_target_size[0]
        target = self.image_target_size[0], self.image_target_size[1]
        edge, letter_box = self.shortest_image_edge, self.letter_box_transform
        limits = self.image_min_pixels, self.image_max_pixels
        return ImageGeometry(target, crop, edge, letter_box, *limits, self.use_albumentations)

    @property
    def crops_randomly(self) -> bool:
        random = self.use_albumentations if self.random_crop is None else self.random_crop
        return random and 0 < (self.geometry.crop or 0) < 1
