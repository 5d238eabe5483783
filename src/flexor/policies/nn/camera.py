"""A camera image as a short vector: a ResNet, then the positions of a few learned features in the image.

Spatial softmax (Finn et al. 2016, https://arxiv.org/abs/1509.06113) keeps positions and drops everything
else. That suits manipulation and keeps the vector small. Parameter names are LeRobot's.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.rng import NoiseSource
from flexor.policies.nn.batchnorm import BatchNorm2d
from flexor.policies.nn.resnet import ResNet, UnnamedResNet

Size = tuple[int, int]  # height, width


@dataclass
class VisionSettings:
    """The settings of every policy with this image encoder, under LeRobot's names."""

    vision_backbone: str = "resnet18"
    """The ResNet that encodes a camera: resnet18, 34, 50, 101 or 152."""
    crop_shape: Size | None = None
    """Height and width of the crop of an image; null for no crop."""
    crop_is_random: bool = True
    """In training, crop at a random position instead of the centre. At inference the crop is always in the centre."""
    pretrained_backbone_weights: str | None = "ResNet18_Weights.IMAGENET1K_V1"
    """ImageNet weights to initialise the backbone with; null for random weights."""
    use_group_norm: bool = False
    """Use group normalisation in the backbone instead of batch normalisation; requires random weights."""
    spatial_softmax_num_keypoints: int = 32
    """Number of keypoints that the encoder finds in an image."""

    @property
    def crop(self) -> Size | None:
        """Height and width of the crop."""
        return self.crop_shape

    def check_vision(self, cameras: dict[str, tuple[int, ...]]) -> None:
        """Refuse invalid settings; `cameras` are the shapes of images before the crop, by name."""
        if self.spatial_softmax_num_keypoints < 1:
            raise ConfigError(
                f"policy.spatial_softmax_num_keypoints={self.spatial_softmax_num_keypoints} must be at least 1."
            )
        if self.use_group_norm and self.pretrained_backbone_weights is not None:
            raise ConfigError(
                "policy.use_group_norm=true replaces the normalisation that ImageNet weights were trained with: "
                "also set --policy.pretrained_backbone_weights=null."
            )
        if self.crop is None:
            return
        if min(self.crop) < 1:
            raise ConfigError(f"policy.crop_shape={list(self.crop)} must be at least 1 by 1.")
        for name, (*_, height, width) in cameras.items():
            if self.crop[0] > height or self.crop[1] > width:
                raise ConfigError(
                    f"policy.crop_shape={list(self.crop)} does not fit into {name}, which is [{height}, {width}]."
                )


class SpatialSoftmax(nn.Module):
    """Feature maps [B, C, H, W] -> the mean position [B, K, 2] (x, y in -1..1) of each of K mixtures of them."""

    pos_grid: Tensor  # [H * W, 2]

    def __init__(self, channels: int, height: int, width: int, keypoints: int):
        super().__init__()
        self.nets = nn.Conv2d(channels, keypoints, 1)
        x, y = np.meshgrid(np.linspace(-1, 1, width), np.linspace(-1, 1, height))
        grid = np.stack((x.ravel(), y.ravel()), axis=1)
        self.register_buffer("pos_grid", torch.from_numpy(grid).float())

    def forward(self, features: Tensor) -> Tensor:
        heat = self.nets(features).flatten(2)  # [B, K, H * W]
        # in full precision: bfloat16 would round positions to whole pixels
        with torch.autocast(heat.device.type, enabled=False):
            return heat.to(self.pos_grid.dtype).softmax(-1) @ self.pos_grid


class RgbEncoder(nn.Module):
    """Images [B, ..., 3, H, W] -> features [B, ..., 2 * keypoints]: resize, crop, ResNet, spatial softmax."""

    def __init__(self, settings: VisionSettings, image_shape: tuple[int, ...], resize: Size | None = None):
        super().__init__()
        self.settings = settings
        channels, *size = image_shape
        if channels != 3:
            raise ConfigError(
                f"A camera has {channels} channels, but a ResNet requires colour images with 3."
            )
        self.resize = resize
        resnet = ResNet(
            settings.vision_backbone, group_norm_of_16 if settings.use_group_norm else BatchNorm2d
        )
        self.backbone = UnnamedResNet(*resnet.children())
        input_size = settings.crop or resize or size
        height, width = resnet.feature_map_size(*input_size)
        if height * width == 1:
            warn_single_pixel(*input_size)
        keypoints = settings.spatial_softmax_num_keypoints
        self.pool = SpatialSoftmax(resnet.out_channels, height, width, keypoints)
        self.feature_dim = 2 * keypoints
        self.out = nn.Linear(self.feature_dim, self.feature_dim)

    def forward(self, images: Tensor, noise: NoiseSource, name: str = "crop") -> Tensor:
        """In training, `noise` under `name` gives the crop's position: the same for all images of a sample."""
        batch, middle = len(images), images.shape[1:-3]
        random = self.settings.crop_is_random and self.training
        x = resize_and_crop(images, self.resize, self.settings.crop, noise if random else None, name)
        keypoints = self.pool(self.backbone(x)).flatten(1)
        return F.relu(self.out(keypoints)).unflatten(0, (batch, *middle))

    def load_imagenet(self) -> None:
        """Load the published weights that the settings name into the ResNet, if they name some."""
        if self.settings.pretrained_backbone_weights is None:
            return
        resnet = ResNet(self.settings.vision_backbone, BatchNorm2d)
        resnet.load_imagenet(self.settings.pretrained_backbone_weights)
        self.backbone.load_state_dict(nn.Sequential(*resnet.children()).state_dict())


@functools.cache
def warn_single_pixel(height: int, width: int) -> None:
    """Warn once, however many cameras there are."""
    log.warning(
        "A ResNet reduces images of %d x %d pixels to a single point, so positions are lost and the cameras have no "
        "effect. Use images larger than 32 x 32 pixels, or enlarge them if the policy supports it "
        "(--policy.resize_shape=[64,64]).",
        height,
        width,
    )


def group_norm_of_16(channels: int) -> nn.Module:
    return nn.GroupNorm(channels // 16, channels)


def resize_and_crop(
    images: Tensor, resize: Size | None, crop: Size | None, noise: NoiseSource | None, name: str = "crop"
) -> Tensor:
    """Images [B, ..., 3, H, W] -> [B * ..., 3, h, w]: cropped at random if there is `noise`, else in the centre."""
    x = images.flatten(0, -4)  # [B * ..., 3, H, W]
    if resize is not None and resize != tuple(images.shape[-2:]):
        x = F.interpolate(x, resize, mode="bilinear", align_corners=False, antialias=True)
    if crop is not None and noise is not None:
        return random_crop(x.unflatten(0, (len(images), -1)), crop, noise, name).flatten(0, 1)
    return x if crop is None else center_crop(x, crop)


def center_crop(x: Tensor, size: Size) -> Tensor:
    """The centre [..., h, w] of [..., H, W]. Half a pixel is rounded to an even number, as in torchvision."""
    top, left = (round((have - want) / 2) for have, want in zip(x.shape[-2:], size))
    return x[..., top : top + size[0], left : left + size[1]]


def random_crop(
    x: Tensor, size: Size, noise: NoiseSource, name: str, border: int = 0, together: bool = True
) -> Tensor:
    """Crop each sample at another random position: [B, N, C, H, W] -> [B, N, C, h, w].

    All images of a sample (of several time steps) are cropped at the same position, so that the crop adds no motion;
    or, if not `together`, each at its own. Crops may reach `border` pixels beyond the edge; the pixels of the edge are
    repeated there.
    """
    counts, (height, width) = x.shape[:2], x.shape[-2:]
    slack = [have + 2 * border - want for have, want in zip((height, width), size)]
    shape = counts[:1] if together else counts
    top, left = (
        noise.integers(f"{name}/{side}", shape, space + 1).flatten().to(x.device)
        for side, space in zip(("top", "left"), slack)
    )
    if not together:
        x = x.flatten(0, 1)[:, None]
    rows = top[:, None] + torch.arange(size[0], device=x.device) - border  # [B, h]
    columns = left[:, None] + torch.arange(size[1], device=x.device) - border  # [B, w]
    if border:  # not F.pad: CUDA can't pad tensors of more than 2^31 elements
        rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    sample = torch.arange(len(x), device=x.device)[:, None, None]
    cropped = x[sample, :, :, rows[:, :, None], columns[:, None, :]].movedim((1, 2), (3, 4))
    return cropped if together else cropped[:, 0].unflatten(0, counts)
