"""HIL-SERL's image encoder, a small ResNet with group normalisation, and what follows it: learned sums over the image.

Parameter names are those of `lerobot/resnet10`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.core.errors import ConfigError
from flexor.core.model_files import ModelFiles
from flexor.core.rng import NoiseSource
from flexor.core.run_files import WEIGHTS
from flexor.core.weight_files import WeightFiles

CHANNELS = (64, 128, 256, 512)  # of its blocks
GROUPS = 4


class GroupNormBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)
        self.shortcut: nn.Module | None = None
        if inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(GROUPS, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        residual = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(residual + (x if self.shortcut is None else self.shortcut(x)))


class SamePool(nn.Module):
    """Max pooling with JAX's padding: on the right and below only."""

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=float("-inf")), 3, 2)


class ResNet10(nn.Module):
    """HIL-SERL's image encoder: four residual blocks with group normalisation."""

    def __init__(self, channels: int = 3):
        super().__init__()
        stem = CHANNELS[0]
        self.embedder = nn.Sequential(
            nn.Conv2d(channels, stem, 7, 2, padding=3, bias=False),
            nn.GroupNorm(GROUPS, stem),
            nn.ReLU(),
            SamePool(),
        )
        pairs = zip((stem, *CHANNELS), CHANNELS)
        blocks = [GroupNormBlock(*pair, stride=2 if number else 1) for number, pair in enumerate(pairs)]
        self.encoder = nn.ModuleDict({"stages": nn.Sequential(*blocks)})

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.encoder["stages"](self.embedder(images))
        return out


def load_resnet10(network: ResNet10, setting: str, name: str) -> None:
    """Fill it from a folder or Hub repository, such as lerobot/resnet10, which the policy's `setting` names."""
    label = f"{setting}={name}"
    weights = network.state_dict()
    files = WeightFiles(ModelFiles(name, label).folder([WEIGHTS]))
    described = files.described()
    wrong = [
        key for key, value in weights.items() if key not in described or described[key].shape != value.shape
    ]
    if wrong:
        raise ConfigError(
            f"{label} is not a ResNet-10 like lerobot/resnet10: {wrong[0]} is missing or of another shape."
        )
    files.fill(weights)


class SpatialEmbedding(nn.Module):
    """Feature maps [B, C, H, W] -> weighted sums over the image [B, C * K]: each channel has K learned weightings."""

    def __init__(self, channels: int, height: int, width: int, count: int):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(channels, height, width, count))
        nn.init.kaiming_normal_(self.kernel, nonlinearity="linear")

    def forward(self, maps: Tensor) -> Tensor:
        return torch.einsum("bchw,chwk->bck", maps, self.kernel).flatten(1)


def drop(x: Tensor, share: float, noise: NoiseSource, name: str) -> Tensor:
    """Dropout as a function of the noise, so that no generator needs to be saved."""
    stays = noise.uniform(name, x.shape).to(x.device) > share
    return x * stays / (1 - share)
