"""The vision transformer of Qwen3-VL (Bai et al. 2025, https://arxiv.org/abs/2511.21631).

Every patch of an image attends to all others. The features of a few blocks leave it as well: the language model adds
them to an image's tokens after its first layers (DeepStack). Parameter names are those of `transformers`, below
`visual.`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.policies.nn.autocast import autocast_type
from flexor.policies.nn.rope import Rope, apply_rope
from flexor.policies.vlm.qwen2_5_images import MERGE, ImageGrid
from flexor.policies.vlm.qwen2_5_vision import FRAMES, rope_2d

PATCH = 16


@dataclass(frozen=True)
class Qwen3VisionSize:
    """The size of the vision transformer; the defaults are those of Qwen3-VL 2B."""

    width: int = 1024
    depth: int = 24
    mlp_width: int = 4096
    heads: int = 16
    output_width: int = 2048
    """Width of the language model's tokens."""
    positions: int = 48
    """Rows and columns of the table of learned positions."""
    deepstack: tuple[int, ...] = (5, 11, 17)
    """Blocks whose features the language model adds after its first layers."""

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def feature_width(self) -> int:
        """Channels of an image's features: those of its tokens, and those that are added later."""
        return self.output_width * (1 + len(self.deepstack))


class PatchProjection(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        kernel = (FRAMES, PATCH, PATCH)
        self.proj = nn.Conv3d(3, width, kernel, stride=kernel)

    def forward(self, patches: Tensor) -> Tensor:
        """Patches of still images [B, N, 3 * 16 * 16] -> [B, N, width]: both frames are equal, so weights add up."""
        weight = self.proj.weight.to(autocast_type(patches)).float()  # as it is used, also if it is stored so
        return F.linear(patches, weight.sum(2).flatten(1).to(patches.dtype), self.proj.bias)


class GridTables(nn.Module):
    """What follows from the grid of an image's patches: their positions, in the table and as angles."""

    corners: Tensor
    weights: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, grid: ImageGrid, size: Qwen3VisionSize):
        super().__init__()
        rows, columns = patch_places(grid)
        corners, weights = interpolate_positions(grid, size.positions)
        cos, sin = rope_2d(rows, columns, size.head_width)
        for name, table in {"corners": corners, "weights": weights, "cos": cos, "sin": sin}.items():
            self.register_buffer(name, table, persistent=False)

    @property
    def rope(self) -> Rope:
        return Rope(self.cos[None, :, None], self.sin[None, :, None])


def patch_places(grid: ImageGrid) -> tuple[Tensor, Tensor]:
    """Row and column [patches] of each patch: those of a token are neighbours."""
    order = torch.arange(grid.patches, device="cpu").view(
        grid.rows // MERGE, grid.columns // MERGE, MERGE, MERGE
    )
    block_row, block_column, row, column = torch.unravel_index(order.flatten(), order.shape)
    return block_row * MERGE + row, block_column * MERGE + column


def interpolate_positions(grid: ImageGrid, side: int) -> tuple[Tensor, Tensor]:
    """The four rows [4, patches] of a table of side x side positions around each patch, and their weights."""
    axes = zip((grid.rows, grid.columns), patch_places(grid))
    neighbours = []
    for count, place in axes:
        at = torch.linspace(0, side - 1, count, device="cpu")[place]
        first = at.int()
        share = at - first
        neighbours.append(((first, 1 - share), ((first + 1).clamp(max=side - 1), share)))
    pairs = [(row, column) for row in neighbours[0] for column in neighbours[1]]
    corners = torch.stack([(row * side + column).long() for (row, _), (column, _) in pairs])
    return corners, torch.stack([down * across for (_, down), (_, across) in pairs])


class ImageAttention(nn.Module):
    def __init__(self, size: Qwen3VisionSize):
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.proj = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        """x [B, N, width] -> the same shape."""
        projected = self.qkv(x).unflatten(-1, (3 * self.heads, -1))  # queries, keys and values
        rotated = apply_rope(projected[:, :, : 2 * self.heads].contiguous(), rope)
        q, k = rotated.to(projected.dtype).transpose(1, 2).chunk(2, dim=1)
        v = projected[:, :, 2 * self.heads :].transpose(1, 2)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ImageMLP(nn.Module):
    def __init__(self, size: Qwen3VisionSize):
        super().__init__()
        self.linear_fc1 = nn.Linear(size.width, size.mlp_width)
        self.linear_fc2 = nn.Linear(size.mlp_width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class ImageBlock(nn.Module):
    def __init__(self, size: Qwen3VisionSize):
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width, eps=1e-6)
        self.norm2 = nn.LayerNorm(size.width, eps=1e-6)
        self.attn = ImageAttention(size)
        self.mlp = ImageMLP(size)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        dtype = autocast_type(x)  # of the norms' outputs: cast once, for all layers that get them
        x = x + self.attn(self.norm1(x).to(dtype), rope)
        return x + self.mlp(self.norm2(x).to(dtype))


class TokenMerger(nn.Module):
    """The patches of a token become a token of the language model."""

    def __init__(self, size: Qwen3VisionSize, normalize_tokens: bool = False):
        """`normalize_tokens`: normalise all channels of a token together, instead of those of each patch."""
        super().__init__()
        width = size.width * MERGE**2
        self.normalize_tokens = normalize_tokens
        self.norm = nn.LayerNorm(width if normalize_tokens else size.width, eps=1e-6)
        self.linear_fc1 = nn.Linear(width, width)
        self.linear_fc2 = nn.Linear(width, size.output_width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, width] -> [B, N / 4, output_width]."""
        if self.normalize_tokens:
            tokens = self.norm(x.unflatten(1, (-1, MERGE**2)).flatten(2))
        else:
            tokens = self.norm(x).unflatten(1, (-1, MERGE**2)).flatten(2)
        return self.linear_fc2(F.gelu(self.linear_fc1(tokens)))


class Qwen3Vision(nn.Module):
    """Images -> features: tokens of the language model, and what it adds to them after its first layers."""

    def __init__(self, size: Qwen3VisionSize, grids: Sequence[ImageGrid]):
        """`grids` of all images, in their order."""
        super().__init__()
        self.size, self.grids = size, list(grids)
        self.patch_embed = PatchProjection(size.width)
        self.pos_embed = nn.Embedding(size.positions**2, size.width)
        self.blocks = nn.ModuleList(ImageBlock(size) for _ in range(size.depth))
        self.merger = TokenMerger(size)
        self.deepstack_merger_list = nn.ModuleList(
            TokenMerger(size, normalize_tokens=True) for _ in size.deepstack
        )
        self.tables = nn.ModuleDict({_name(grid): GridTables(grid, size) for grid in grids})

    def forward(self, patches: Sequence[Tensor]) -> Tensor:
        """Patches [B, N, 3 * 16 * 16] of each image -> the features of all [B, tokens, feature_width]."""
        if len({*self.grids}) == 1:  # side by side
            together = self.encode(torch.cat(list(patches)), self.grids[0])
            return torch.cat(together.chunk(len(patches)), 1)
        return torch.cat([self.encode(*image) for image in zip(patches, self.grids, strict=True)], 1)

    def encode(self, patches: Tensor, grid: ImageGrid) -> Tensor:
        """Patches [B, N, 3 * 16 * 16] of images on this grid -> features [B, N / 4, feature_width]."""
        tables = self.tables[_name(grid)]
        assert isinstance(tables, GridTables)
        positions = (self.pos_embed(tables.corners) * tables.weights[..., None].to(patches.dtype)).sum(0)
        x = self.patch_embed(patches) + positions
        rope, early = tables.rope, []
        for number, block in enumerate(self.blocks):
            x = block(x, rope)
            if number in self.size.deepstack:
                merger = self.deepstack_merger_list[self.size.deepstack.index(number)]
                early.append(merger(x))
        return torch.cat((self.merger(x), *early), -1)


def _name(grid: ImageGrid) -> str:
    return f"{grid.rows}x{grid.columns}"
