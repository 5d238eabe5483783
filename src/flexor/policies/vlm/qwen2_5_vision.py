"""The vision transformer of Qwen2.5-VL (Bai et al. 2025, https://arxiv.org/abs/2502.13923).

Most blocks attend within windows of 112 x 112 pixels, a few within the whole image. Patches are put into the order of
the windows before the first block, so that the windows of one size are a reshape away from a batch. Images of different
sizes go through the blocks as one sequence. Parameter names are those of `transformers`, below `visual.`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.kernels.language_model import rms_norm
from flexor.policies.nn.autocast import autocast_type
from flexor.policies.nn.rope import Rope, apply_rope
from flexor.policies.nn.transformer import GatedMLP
from flexor.policies.vlm.qwen2_5_images import MERGE, PATCH, ImageGrid

FRAMES = 2  # a patch spans two frames of a video; an image counts as two equal frames


@dataclass(frozen=True)
class QwenVisionSize:
    """The size of the vision transformer; the defaults are those of all published models."""

    width: int = 1280
    depth: int = 32
    mlp_width: int = 3420
    heads: int = 16
    output_width: int = 2048
    """Width of the language model's tokens."""
    window: int = 112
    """Height and width of a window, in pixels."""
    full_attention: tuple[int, ...] = (7, 15, 23, 31)
    """Blocks that attend within the whole image."""

    @property
    def head_width(self) -> int:
        return self.width // self.heads


class Segment(NamedTuple):
    """Neighbouring groups of patches that attend within each group."""

    groups: int
    patches: int  # of each group


class VisionLayout(NamedTuple):
    """The order of the patches of an observation's images, and which of them attend to each other."""

    order: Tensor  # [tokens]: the token (of 2 x 2 patches) at each place of the windows' order
    inverse: Tensor  # [tokens]: the place of each token
    rows: Tensor  # [patches], in the windows' order
    columns: Tensor
    windows: list[Segment]
    images: list[Segment]


def layout_images(grids: Sequence[ImageGrid], window: int) -> VisionLayout:
    """`window`: height and width of a window in tokens."""
    order, rows, columns, window_sizes = [], [], [], []
    start = 0
    for grid in grids:
        height, width = grid.rows // MERGE, grid.columns // MERGE
        tokens = torch.arange(height * width, device="cpu").view(height, width)
        windows = [part for band in tokens.split(window) for part in band.split(window, dim=1)]
        windows.sort(key=torch.numel, reverse=True)  # those of one size are neighbours
        in_order = torch.cat([part.flatten() for part in windows])
        order.append(in_order + start)
        patch = torch.arange(MERGE, device="cpu")
        row, column = in_order // width * MERGE, in_order % width * MERGE
        rows.append((row[:, None, None] + patch[:, None]).expand(-1, -1, MERGE).flatten())
        columns.append((column[:, None, None] + patch).expand(-1, MERGE, -1).flatten())
        window_sizes += [part.numel() * MERGE**2 for part in windows]
        start += grid.tokens
    joined = torch.cat(order)
    return VisionLayout(
        joined,
        joined.argsort(),
        torch.cat(rows),
        torch.cat(columns),
        _merge_equal(window_sizes),
        _merge_equal([grid.patches for grid in grids]),
    )


def _merge_equal(sizes: Sequence[int]) -> list[Segment]:
    return [Segment(len(list(equal)), size) for size, equal in groupby(sizes)]


class VisionPatchEmbedding(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        kernel = (FRAMES, PATCH, PATCH)
        self.proj = nn.Conv3d(3, width, kernel, stride=kernel, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        """Patches of still images [B, N, 3 * 14 * 14] -> [B, N, width]: both frames are equal, so weights add up."""
        return F.linear(patches, self.proj.weight.sum(2).flatten(1))


class VisionNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """In float32; the output has the type of matrix products."""
        return rms_norm(x, self.weight, 0.0, 1e-6, autocast_type(x))


class VisionAttention(nn.Module):
    def __init__(self, size: QwenVisionSize):
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.proj = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor, rope: Rope, segments: Sequence[Segment]) -> Tensor:
        """x [B, N, width] -> the same shape."""
        projected = self.qkv(x).unflatten(-1, (3 * self.heads, -1))  # queries, keys and values
        rotated = apply_rope(projected[:, :, : 2 * self.heads].contiguous(), rope)
        values = projected[:, :, 2 * self.heads :]
        sizes = [segment.groups * segment.patches for segment in segments]
        parts = zip(segments, rotated.split(sizes, dim=1), values.split(sizes, dim=1))
        return self.proj(torch.cat([_attend(*part) for part in parts], 1))


def _attend(segment: Segment, rotated: Tensor, values: Tensor) -> Tensor:
    """Queries and keys [B, N, 2 * heads, D], values [B, N, heads, D] -> [B, N, heads * D]."""
    batch = len(values)
    qk, v = (
        each.unflatten(1, (segment.groups, segment.patches)).flatten(0, 1).transpose(1, 2)
        for each in (rotated, values)
    )  # [B * groups, heads, patches, D]
    q, k = qk.chunk(2, dim=1)
    out = F.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2).flatten(2).unflatten(0, (batch, -1)).flatten(1, 2)


class VisionBlock(nn.Module):
    def __init__(self, size: QwenVisionSize):
        super().__init__()
        self.norm1 = VisionNorm(size.width)
        self.norm2 = VisionNorm(size.width)
        self.attn = VisionAttention(size)
        self.mlp = GatedMLP(size.width, size.mlp_width, "silu", bias=True)

    def forward(self, x: Tensor, rope: Rope, segments: Sequence[Segment]) -> Tensor:
        x = x + self.attn(self.norm1(x), rope, segments)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nn.Module):
    """The patches of a token become a token of the language model."""

    def __init__(self, size: QwenVisionSize):
        super().__init__()
        width = size.width * MERGE**2
        self.ln_q = VisionNorm(size.width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, size.output_width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, width] -> [B, N / 4, output_width]."""
        return self.mlp(self.ln_q(x).unflatten(1, (-1, MERGE**2)).flatten(2))


class VisionTables(NamedTuple):
    """What follows from the grids of images: see `VisionLayout`; cosines and sines of positions [patches, D]."""

    order: Tensor
    inverse: Tensor
    cos: Tensor
    sin: Tensor
    windows: list[Segment]
    images: list[Segment]

    @classmethod
    def of(cls, grids: Sequence[ImageGrid], size: QwenVisionSize) -> VisionTables:
        layout = layout_images(grids, max(1, size.window // (PATCH * MERGE)))
        positions = rope_2d(layout.rows, layout.columns, size.head_width)
        return cls(layout.order, layout.inverse, *positions, layout.windows, layout.images)

    def to(self, device: torch.device) -> VisionTables:
        tensors = {name: getattr(self, name).to(device) for name in ("order", "inverse", "cos", "sin")}
        return self._replace(**tensors)


class QwenVision(nn.Module):
    """The images of an observation -> tokens of the language model."""

    order: Tensor
    inverse: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, size: QwenVisionSize, grids: Sequence[ImageGrid]):
        """`grids` of all images, in their order."""
        super().__init__()
        self.size = size
        self.full_attention = frozenset(size.full_attention)
        self.patch_embed = VisionPatchEmbedding(size.width)
        self.blocks = nn.ModuleList(VisionBlock(size) for _ in range(size.depth))
        self.merger = PatchMerger(size)
        equal = len({*grids}) == 1
        self.images_as_batch = len(grids) if equal else 1
        """Images of one size do not go through the blocks as one sequence, but side by side."""
        tables = VisionTables.of(grids[:1] if equal else grids, size)
        self.windows, self.images = tables.windows, tables.images
        for name in ("order", "inverse", "cos", "sin"):
            self.register_buffer(name, getattr(tables, name), persistent=False)
        self.apply(_initialize)

    def forward(self, patches: Tensor) -> Tensor:
        """Patches [B, N, 3 * 14 * 14], see `QwenImages` -> tokens [B, N / 4, output_width]."""
        count = self.images_as_batch
        tables = VisionTables(self.order, self.inverse, self.cos, self.sin, self.windows, self.images)
        sequences = patches.unflatten(1, (count, -1)).flatten(0, 1)
        return self._encode(sequences, tables).unflatten(0, (-1, count)).flatten(1, 2)

    def encode_alone(self, patches: Tensor, grid: ImageGrid) -> Tensor:
        """The same of single images on this grid."""
        return self._encode(patches, VisionTables.of([grid], self.size).to(patches.device))

    def _encode(self, patches: Tensor, tables: VisionTables) -> Tensor:
        tokens = patches.unflatten(1, (-1, MERGE**2)).index_select(1, tables.order)
        x = self.patch_embed(tokens.flatten(1, 2)).to(patches.dtype)
        rope = Rope(tables.cos[None, :, None], tables.sin[None, :, None])
        for number, block in enumerate(self.blocks):
            segments = tables.images if number in self.full_attention else tables.windows
            x = block(x, rope, segments)
        return self.merger(x).index_select(1, tables.inverse)


def rope_2d(rows: Tensor, columns: Tensor, head_width: int, theta: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, head_width] of patches at these rows and columns: each rotates half of the channels."""
    pairs = head_width // 4  # of each axis
    frequency = 1 / theta ** (torch.arange(pairs, device="cpu").float() / pairs)
    angle = torch.cat([axis[:, None] * frequency for axis in (rows, columns)], 1)
    sin = angle.sin()
    return angle.cos().repeat(1, 2), torch.cat((-sin, sin), -1)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Conv3d):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
