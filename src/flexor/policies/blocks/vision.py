"""A camera picture as a short vector: ResNet, then where each of a few learned features is in the picture.

Spatial softmax (Finn et al. 2016, https://arxiv.org/abs/1509.06113) keeps positions and drops everything
else, which suits manipulation and keeps the vector small. Parameter names are LeRobot's.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.errors import ConfigError
from flexor.log import log
from flexor.policies.base import NoiseSource
from flexor.policies.blocks.batchnorm import BatchNorm2d
from flexor.policies.blocks.resnet import ResNet

Size = tuple[int, int]  # height, width


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
    """Pictures [B, ..., 3, H, W] -> features [B, ..., 2 * keypoints]: resize, crop, ResNet, spatial softmax."""

    def __init__(
        self,
        image_shape: tuple[int, ...],
        backbone: str = "resnet18",
        *,
        keypoints: int = 32,
        group_norm: bool = False,
        resize: Size | None = None,
        crop: Size | None = None,
        random_crop: bool = True,
    ):
        super().__init__()
        channels, *size = image_shape
        if channels != 3:
            raise ConfigError(f"A camera has {channels} channels: a ResNet sees colour pictures with 3.")
        self.resize = resize
        self.crop = crop
        self.random_crop = random_crop
        self.backbone_name = backbone
        resnet = ResNet(backbone, group_norm_of_16 if group_norm else BatchNorm2d)
        self.backbone = nn.Sequential(*resnet.children())
        height, width = resnet.feature_map_size(*(crop or resize or size))
        if height * width == 1:
            warn_blind(*(crop or resize or size))
        self.pool = SpatialSoftmax(resnet.out_channels, height, width, keypoints)
        self.feature_dim = 2 * keypoints
        self.out = nn.Linear(self.feature_dim, self.feature_dim)

    def forward(self, images: Tensor, noise: NoiseSource, name: str = "crop") -> Tensor:
        """`noise` says where pictures are cropped in training, under `name`: once for all of a sample's."""
        batch, middle, size = len(images), images.shape[1:-3], images.shape[-2:]
        x = images.flatten(0, -4)  # [B * ..., 3, H, W]
        if self.resize is not None and self.resize != tuple(size):
            x = F.interpolate(x, self.resize, mode="bilinear", align_corners=False, antialias=True)
        if self.crop is not None and self.random_crop and self.training:
            x = random_crop(x.unflatten(0, (batch, -1)), self.crop, noise, name).flatten(0, 1)
        elif self.crop is not None:
            x = center_crop(x, self.crop)
        keypoints = self.pool(self.backbone(x)).flatten(1)
        return F.relu(self.out(keypoints)).unflatten(0, (batch, *middle))

    def load_imagenet(self, weights: str) -> None:
        """Start the ResNet from published weights; they fit batch normalisation only."""
        resnet = ResNet(self.backbone_name, BatchNorm2d)
        resnet.load_imagenet(weights)
        self.backbone.load_state_dict(nn.Sequential(*resnet.children()).state_dict())


@functools.cache
def warn_blind(height: int, width: int) -> None:
    """Once, however many cameras there are."""
    log.warning(
        "Of pictures of %d x %d pixels a ResNet leaves a single point, and where something is can't be told: "
        "the cameras are of no use. Take pictures of more than 32 x 32, or enlarge them if the policy can "
        "(--policy.resize_shape=[64,64]).",
        height,
        width,
    )


def group_norm_of_16(channels: int) -> nn.Module:
    return nn.GroupNorm(channels // 16, channels)


def center_crop(x: Tensor, size: Size) -> Tensor:
    """The middle [..., h, w] of [..., H, W]; half a pixel is rounded to an even number, as torchvision does."""
    top, left = (round((have - want) / 2) for have, want in zip(x.shape[-2:], size))
    return x[..., top : top + size[0], left : left + size[1]]


def random_crop(x: Tensor, size: Size, noise: NoiseSource, name: str) -> Tensor:
    """Another place for each sample: [B, N, C, H, W] -> [B, N, C, h, w].

    A sample's pictures (of several moments) are cropped alike, so that only what moved has moved.
    """
    batch = len(x)
    slack = [have - want for have, want in zip(x.shape[-2:], size)]
    top, left = (
        noise.integers(f"{name}/{side}", (batch,), space + 1).to(x.device)
        for side, space in zip(("top", "left"), slack)
    )
    rows = top[:, None] + torch.arange(size[0], device=x.device)  # [B, h]
    columns = left[:, None] + torch.arange(size[1], device=x.device)  # [B, w]
    sample = torch.arange(batch, device=x.device)[:, None, None]
    return x[sample, :, :, rows[:, :, None], columns[:, None, :]].movedim((1, 2), (3, 4))


def check_vision(
    backbone_weights: str | None,
    group_norm: bool,
    crop: Size | None,
    cameras: dict[str, tuple[int, ...]],
) -> None:
    """Refuse settings no encoder can have; `cameras` are the sizes of what is cropped, by name."""
    if group_norm and backbone_weights is not None:
        raise ConfigError(
            "policy.use_group_norm=true replaces the normalisation ImageNet weights were trained with: "
            "set --policy.pretrained_backbone_weights=null too."
        )
    if crop is None:
        return
    if min(crop) < 1:
        raise ConfigError(f"policy.crop_shape={list(crop)} must be at least 1 by 1.")
    for name, (*_, height, width) in cameras.items():
        if crop[0] > height or crop[1] > width:
            raise ConfigError(
                f"policy.crop_shape={list(crop)} does not fit into {name}, which is [{height}, {width}]."
            )
