"""DaViT (Ding et al. 2022, https://arxiv.org/abs/2204.03645): a vision transformer with two kinds of attention.

Four stages halve the image's grid again and again. In each block, pixels first attend to each other within windows, and
then channels to each other over the whole image. So the cost grows with the image's area, not with its square.
Parameter names are those of Florence-2 in `transformers`, below `vision_tower.`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.policies.nn.autocast import autocast_type
from flexor.policies.nn.drop_path import drop_path


@dataclass(frozen=True)
class DaViTStage:
    """A stage: a convolution that makes the grid smaller, and blocks."""

    inputs: int
    """Channels of the grid before."""
    width: int
    depth: int
    heads: int
    groups: int
    """Channels attend to each other within so many groups."""
    kernel: int
    stride: int
    padding: int
    norm_first: bool
    """Whether the grid is normalised before the convolution, not after it."""

    def output(self, size: int) -> int:
        """Rows, or columns, of the grid after the convolution; less than 1 if the image is too small."""
        return (size + 2 * self.padding - self.kernel) // self.stride + 1


@dataclass(frozen=True)
class DaViTSize:
    stages: tuple[DaViTStage, ...]
    window: int = 12
    """Rows and columns of a window."""
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    drop_path: float = 0.1
    """The share of samples that the last branch is left out for, in training; for earlier ones it is lower."""

    @property
    def width(self) -> int:
        """Channels of the last grid."""
        return self.stages[-1].width

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the last grid, of an image of this size."""
        for stage in self.stages:
            height, width = stage.output(height), stage.output(width)
        return height, width

    def drop_rates(self) -> list[float]:
        """Of every attention in the order of the network: they grow evenly."""
        count = 2 * sum(stage.depth for stage in self.stages)
        return [self.drop_path * number / max(1, count - 1) for number in range(count)]


class Downsampling(nn.Module):
    """A convolution with a stride, and a norm before or after it."""

    def __init__(self, stage: DaViTStage):
        super().__init__()
        self.conv = nn.Conv2d(stage.inputs, stage.width, stage.kernel, stage.stride, stage.padding)
        self.norm = nn.LayerNorm(stage.inputs if stage.norm_first else stage.width)
        self.norm_first = stage.norm_first

    def forward(self, x: Tensor) -> Tensor:
        """[N, h, w, C] -> [N, rows, columns, width]."""
        x = self.norm(x) if self.norm_first else x
        x = _convolved(self.conv, x)
        return x if self.norm_first else self.norm(x)


class WindowAttention(nn.Module):
    """Pixels attend to those of their window. The last windows are filled up, and what fills them is attended to."""

    def __init__(self, width: int, heads: int, window: int, qkv_bias: bool):
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, rows, columns, width], normalised."""
        rows, columns, size = x.shape[1], x.shape[2], self.window
        x = F.pad(x, (0, 0, 0, -columns % size, 0, -rows % size))
        down, across = x.shape[1] // size, x.shape[2] // size
        tiles = x.unflatten(2, (across, size)).unflatten(1, (down, size)).transpose(2, 3)
        windows = tiles.reshape(-1, size * size, x.shape[-1])  # [N * down * across, size^2, width]
        qkv = self.qkv(windows).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [windows, heads, size^2, head width]
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        tiles = self.proj(mixed).view(len(x), down, across, size, size, -1)
        return tiles.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :rows, :columns]


class ChannelAttention(nn.Module):
    """Channels attend to those of their group: a channel's values at all pixels are its vector."""

    def __init__(self, width: int, groups: int, qkv_bias: bool):
        super().__init__()
        self.groups = groups
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, rows, columns, width], normalised."""
        pixels = x.flatten(1, 2)
        qkv = self.qkv(pixels).unflatten(-1, (3, self.groups, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [N, groups, pixels, channels]
        if v.dtype == torch.bfloat16 and not torch.is_autocast_enabled(v.device.type):
            mixed = F.scaled_dot_product_attention(q.mT, k.mT, v.mT).mT  # rounds where LeRobot does
        else:  # fused attention has no kernel for vectors as long as an image; there are only few of them
            scores = (q * q.shape[2] ** -0.5).mT @ k  # [N, groups, channels, channels]
            mixed = v @ scores.softmax(-1).to(v.dtype).mT
        return self.proj(mixed.transpose(1, 2).flatten(2).contiguous()).view_as(x)


class ConvMLP(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class DaViTLayer(nn.Module):
    """Attention and a feed-forward layer; before each, a convolution of every channel adds where a pixel is."""

    def __init__(self, stage: DaViTStage, size: DaViTSize, attention: str, drop_rate: float):
        """`attention`: window_attn or channel_attn."""
        super().__init__()
        width, self.attention, self.drop_rate = stage.width, attention, drop_rate
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm1 = nn.LayerNorm(width)
        if attention == "window_attn":
            self.window_attn = WindowAttention(width, stage.heads, size.window, size.qkv_bias)
        else:
            self.channel_attn = ChannelAttention(width, stage.groups, size.qkv_bias)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm2 = nn.LayerNorm(width)
        self.ffn = ConvMLP(width, int(width * size.mlp_ratio))

    def forward(self, x: Tensor) -> Tensor:
        """[N, rows, columns, width]."""
        dtype = autocast_type(x)  # of the norms' outputs: cast once, for all layers that get them
        attend = self.window_attn if self.attention == "window_attn" else self.channel_attn
        x = x + _convolved(self.conv1, x)
        x = x + drop_path(attend(self.norm1(x).to(dtype)), self.drop_rate, self.training)
        x = x + _convolved(self.conv2, x)
        return x + drop_path(self.ffn(self.norm2(x).to(dtype)), self.drop_rate, self.training)


class DaViTBlock(nn.Module):
    def __init__(self, stage: DaViTStage, size: DaViTSize, drop_rates: Sequence[float]):
        super().__init__()
        self.spatial_block = DaViTLayer(stage, size, "window_attn", drop_rates[0])
        self.channel_block = DaViTLayer(stage, size, "channel_attn", drop_rates[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.channel_block(self.spatial_block(x))


class DaViT(nn.Module):
    """Images [N, 3, H, W] -> a grid [N, rows, columns, width]."""

    def __init__(self, size: DaViTSize):
        super().__init__()
        rates = iter(size.drop_rates())
        self.convs = nn.ModuleList(Downsampling(stage) for stage in size.stages)
        self.blocks = nn.ModuleList(
            nn.ModuleList(DaViTBlock(stage, size, (next(rates), next(rates))) for _ in range(stage.depth))
            for stage in size.stages
        )

    def forward(self, images: Tensor) -> Tensor:
        x = images.to(self.dtype).permute(0, 2, 3, 1)
        for downsample, blocks in zip(self.convs, self._stages(), strict=True):
            x = downsample(x)
            for block in blocks:
                x = block(x)
        return x

    @property
    def dtype(self) -> torch.dtype:
        return next(self.convs.parameters()).dtype

    def layers(self) -> list[nn.Module]:
        return [block for blocks in self._stages() for block in blocks]

    def _stages(self) -> Iterator[Iterable[nn.Module]]:
        for blocks in self.blocks:
            assert isinstance(blocks, nn.ModuleList)
            yield blocks


def _convolved(convolution: nn.Conv2d, x: Tensor) -> Tensor:
    """A convolution of [N, rows, columns, C], which is channels-last in memory, as GPUs prefer it."""
    out: Tensor = convolution(x.permute(0, 3, 1, 2))
    return out.permute(0, 2, 3, 1)
