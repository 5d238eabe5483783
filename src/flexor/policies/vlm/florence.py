"""Florence-2 (Xiao et al. 2023, https://arxiv.org/abs/2311.06242) without its decoder: DaViT and BART's encoder.

The tokens of an image are its mean, and then those of the grid, row by row. Nothing here reads a value on the host.
Parameter names are those of `transformers`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flexor.policies.vlm.bart import BartEncoder
from flexor.policies.vlm.davit import DaViT
from flexor.policies.vlm.florence_size import FlorenceSize


class PlaceEmbedding(nn.Module):
    """Where a token is in the grid: of its column in the first half of the channels, of its row in the second."""

    def __init__(self, positions: int, width: int):
        super().__init__()
        self.row_embeddings = nn.Embedding(positions, width // 2)
        self.column_embeddings = nn.Embedding(positions, width - width // 2)

    def forward(self, rows: int, columns: int) -> Tensor:
        """[rows, columns, width]."""
        row = self.row_embeddings.weight[:rows, None].expand(-1, columns, -1)
        column = self.column_embeddings.weight[:columns].expand(rows, -1, -1)
        return torch.cat((column, row), -1)


class FrameEmbedding(nn.Module):
    """Which frame of a video an image is. It is always the first, and its embedding is part of the weights."""

    pos_idx_to_embed: Tensor

    def __init__(self, frames: int, width: int):
        super().__init__()
        channel = torch.arange(width // 2)
        angle = torch.arange(frames)[:, None] / 10_000 ** (channel / (width // 2))
        table = torch.stack((angle.sin(), angle.cos()), -1).flatten(1)
        self.register_buffer("pos_idx_to_embed", table.float())


class Projector(nn.Module):
    """The grid of an image -> tokens of the language model."""

    def __init__(self, size: FlorenceSize):
        super().__init__()
        width = size.vision.width
        self.image_projection = nn.Linear(width, size.text.width, bias=False)
        self.image_proj_norm = nn.LayerNorm(size.text.width)
        self.image_position_embed = PlaceEmbedding(size.places, width)
        self.visual_temporal_embed = FrameEmbedding(size.frames, width)

    def forward(self, grid: Tensor) -> Tensor:
        """[N, rows, columns, width] -> [N, 1 + rows * columns, text width]."""
        grid = grid + self.image_position_embed(*grid.shape[1:3])
        tokens = grid.flatten(1, 2) + self.visual_temporal_embed.pos_idx_to_embed[:1].to(grid.dtype)
        tokens = torch.cat((tokens.mean(1, keepdim=True), tokens), 1)
        return self.image_proj_norm(self.image_projection(tokens))


class LanguageEncoder(nn.Module):
    """The embedding of words, which encoder and decoder share in Florence-2, and the encoder."""

    def __init__(self, size: FlorenceSize):
        super().__init__()
        self.shared = nn.Embedding(size.text.vocabulary, size.text.width)
        self.encoder = BartEncoder(size.text, self.shared)


class Florence(nn.Module):
    def __init__(self, size: FlorenceSize):
        super().__init__()
        self.size = size
        self.vision_tower = DaViT(size.vision)
        self.multi_modal_projector = Projector(size)
        self.language_model = LanguageEncoder(size)
        self.apply(_initialize)

    def encode_images(self, images: Tensor) -> Tensor:
        """Images [N, 3, H, W], normalised as for ImageNet -> [N, rows, columns, vision width]."""
        return self.vision_tower(images)

    def embed_features(self, features: Tensor) -> Tensor:
        """[N, rows, columns, vision width] -> [N, tokens, width]."""
        return self.multi_modal_projector(features)

    def embed_images(self, images: Tensor) -> Tensor:
        """Images [N, 3, H, W], normalised as for ImageNet -> [N, tokens, width]."""
        return self.embed_features(self.encode_images(images))

    def image_encoder(self) -> list[nn.Module]:
        return [self.vision_tower]

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Words [B, L] -> [B, L, width]."""
        return self.language_model.shared(tokens) * self.size.text.embed_scale

    def encode(self, x: Tensor) -> Tensor:
        """Embedded images and words [B, S, width] -> [B, S, width]."""
        return self.language_model.encoder(x)

    def blocks(self) -> list[nn.Module]:
        """What is sharded, compiled and recomputed one by one."""
        return [*self.vision_tower.layers(), *self.language_model.encoder.layers]


def _initialize(module: nn.Module) -> None:
    """Initial values of a Florence-2 without pretrained weights."""
    if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
        nn.init.zeros_(module.bias)
