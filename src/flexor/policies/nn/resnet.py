"""ResNet image encoders with torchvision's parameter names, without torchvision.

The names matter twice: LeRobot's checkpoints and the published ImageNet weights both use them.
"""

import platform
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.core.errors import ConfigError
from flexor.policies.nn.first_convolution import FirstConv2d
from flexor.policies.nn.fused_norm import FrozenBatchNorm2d, norm_relu, norm_relu_pool


class Architecture(NamedTuple):
    depths: tuple[int, int, int, int]
    """Blocks of each stage."""
    bottleneck: bool
    """Blocks of three convolutions instead of two."""
    width: int = 64
    """Channels of the first stage; each further stage has twice as many as the one before."""


ARCHITECTURES = {
    "resnet18": Architecture((2, 2, 2, 2), bottleneck=False),
    "resnet34": Architecture((3, 4, 6, 3), bottleneck=False),
    "resnet50": Architecture((3, 4, 6, 3), bottleneck=True),
    "resnet101": Architecture((3, 4, 23, 3), bottleneck=True),
    "resnet152": Architecture((3, 8, 36, 3), bottleneck=True),
}

# torchvision's names for its ImageNet weights -> the published file
IMAGENET_WEIGHTS = {
    "ResNet18_Weights.IMAGENET1K_V1": "resnet18-f37072fd.pth",
    "ResNet34_Weights.IMAGENET1K_V1": "resnet34-b627a593.pth",
    "ResNet50_Weights.IMAGENET1K_V1": "resnet50-0676ba61.pth",
    "ResNet50_Weights.IMAGENET1K_V2": "resnet50-11ad3fa6.pth",
    "ResNet101_Weights.IMAGENET1K_V1": "resnet101-63fe2227.pth",
    "ResNet101_Weights.IMAGENET1K_V2": "resnet101-cd907fc2.pth",
    "ResNet152_Weights.IMAGENET1K_V1": "resnet152-394f9c45.pth",
    "ResNet152_Weights.IMAGENET1K_V2": "resnet152-f82ba261.pth",
}
WEIGHTS_URL = "https://download.pytorch.org/models/"

Norm = Callable[[int], nn.Module]

# oneDNN has no fast convolution gradients for ARM processors: on maps of a few pixels they are up to
# ten times slower than the same product written as a matrix multiplication.
SLOW_SMALL_MAPS = platform.machine().lower() in ("aarch64", "arm64")


class Conv2d(nn.Conv2d):
    """A square convolution without bias that stays fast on small maps on every processor."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1, dilation: int = 1):
        super().__init__(inputs, outputs, size, stride, size // 2 * dilation, dilation, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        small = x.shape[-2] * x.shape[-1] <= 36 and self.dilation == (1, 1)
        if SLOW_SMALL_MAPS and small and x.device.type == "cpu" and torch.is_grad_enabled():
            return self._as_matrix_product(x)
        return super().forward(x)

    def _as_matrix_product(self, x: Tensor) -> Tensor:
        """The same convolution by im2col, leaving out kernel rows and columns that only ever meet padding."""
        stride, padding = self.stride[0], int(self.padding[0])
        rows, columns = (range(-padding, self.kernel_size[0] - padding) for _ in range(2))
        height, width = (-(-size // stride) for size in x.shape[-2:])

        def used(taps: range, size: int, out: int) -> tuple[int, int]:
            used_taps = [t for t in taps if any(0 <= i * stride + t < size for i in range(out))]
            return used_taps[0], used_taps[-1]

        (top, bottom), (left, right) = used(rows, x.shape[-2], height), used(columns, x.shape[-1], width)
        kernel = self.weight[:, :, top + padding : bottom + padding + 1, left + padding : right + padding + 1]
        pad_bottom = max(0, (height - 1) * stride + bottom + 1 - x.shape[-2])
        pad_right = max(0, (width - 1) * stride + right + 1 - x.shape[-1])
        x = F.pad(x, (-left, pad_right, -top, pad_bottom))
        patches = F.unfold(x, kernel.shape[-2:], stride=stride)  # [B, inputs * taps, pixels]
        return (kernel.flatten(1) @ patches).unflatten(-1, (height, width))


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, inputs: int, width: int, norm: Norm, stride: int = 1, dilation: int = 1):
        super().__init__()
        if dilation > 1:
            raise ConfigError(
                "policy.replace_final_stride_with_dilation=true requires a ResNet-50 or deeper: "
                "set --policy.vision_backbone=resnet50, or leave it out."
            )
        self.conv1 = Conv2d(inputs, width, 3, stride)
        self.bn1 = norm(width)
        self.conv2 = Conv2d(width, width, 3)
        self.bn2 = norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = _shortcut_of(self.downsample, x)
        x = norm_relu(self.bn1, self.conv1(x))
        return norm_relu(self.bn2, self.conv2(x), shortcut)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inputs: int, width: int, norm: Norm, stride: int = 1, dilation: int = 1):
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = Conv2d(inputs, width, 1)
        self.bn1 = norm(width)
        self.conv2 = Conv2d(width, width, 3, stride, dilation)
        self.bn2 = norm(width)
        self.conv3 = Conv2d(width, outputs, 1)
        self.bn3 = norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, outputs, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = _shortcut_of(self.downsample, x)
        x = norm_relu(self.bn1, self.conv1(x))
        x = norm_relu(self.bn2, self.conv2(x))
        return norm_relu(self.bn3, self.conv3(x), shortcut)


def _shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(Conv2d(inputs, outputs, 1, stride), norm(outputs))


def _shortcut_of(downsample: nn.Module | None, x: Tensor) -> Tensor:
    if downsample is None:
        return x
    convolution, norm = downsample.children()
    return norm_relu(norm, convolution(x), relu=False)


def forward_layers(layers: nn.Module, x: Tensor) -> Tensor:
    """`layers` has the children of a ResNet, in their order."""
    convolution, norm, _, _, *stages = layers.children()
    x = norm_relu_pool(norm, convolution(x))
    for stage in stages:
        x = stage(x)
    return x


class UnnamedResNet(nn.Sequential):
    """The layers of a ResNet under numbers instead of names."""

    def forward(self, x: Tensor) -> Tensor:
        return forward_layers(self, x)


class ResNet(nn.Module):
    """Images [B, 3, H, W] -> feature map [B, C, H/32, W/32]: a ResNet without its classifier."""

    def __init__(self, name: str, norm: Norm = FrozenBatchNorm2d, dilate_last_stage: bool = False):
        super().__init__()
        if name not in ARCHITECTURES:
            raise ConfigError(
                f"policy.vision_backbone={name!r} is not a known ResNet; use one of {', '.join(ARCHITECTURES)}."
            )
        depths, bottleneck, width = ARCHITECTURES[name]
        block = Bottleneck if bottleneck else BasicBlock
        self.conv1 = FirstConv2d(3, width, padding=3, bias=False)
        self.bn1 = norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)

        inputs = width
        for stage, depth in enumerate(depths):
            dilate = dilate_last_stage and stage == 3
            stride = 1 if stage == 0 or dilate else 2
            blocks = []
            for i in range(depth):
                # torchvision dilates the last stage from its second block on
                dilation = 2 if dilate and i > 0 else 1
                blocks.append(block(inputs, width, norm, stride if i == 0 else 1, dilation))
                inputs = width * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
            width *= 2
        self.out_channels = inputs
        self.stride = 16 if dilate_last_stage else 32
        self._init_convolutions()

    def _init_convolutions(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return forward_layers(self, x)

    def feature_map_size(self, height: int, width: int) -> tuple[int, int]:
        """Size of the output for a given input: every stride of two rounds up."""
        return -(-height // self.stride), -(-width // self.stride)

    def load_imagenet(self, weights: str) -> None:
        """Load published ImageNet weights, given by torchvision's name. They are downloaded once."""
        if weights not in IMAGENET_WEIGHTS:
            raise ConfigError(
                f"policy.pretrained_backbone_weights={weights!r} is not known; "
                f"use null or one of {', '.join(IMAGENET_WEIGHTS)}."
            )
        file = IMAGENET_WEIGHTS[weights]
        try:
            state = torch.hub.load_state_dict_from_url(
                WEIGHTS_URL + file, map_location="cpu", weights_only=True
            )
        except (urllib.error.URLError, OSError) as error:
            folder = Path(torch.hub.get_dir()) / "checkpoints"
            raise ConfigError(
                f"Can't download the backbone's ImageNet weights ({WEIGHTS_URL}{file}: {error}). Put the file "
                f"into {folder}, or start from random weights with --policy.pretrained_backbone_weights=null."
            ) from error
        names = self.state_dict().keys()
        self.load_state_dict({name: value for name, value in state.items() if name in names})
