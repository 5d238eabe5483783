"""SigLIP's vision transformer (Zhai et al. 2023, https://arxiv.org/abs/2303.15343): an image as one vector per patch.

The image encoder of PaliGemma and SmolVLM2. Parameter names are those of their checkpoints, below `vision_model.`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from flexor.policies.nn.attention import EncoderAttention
from flexor.policies.nn.autocast import autocast_type


@dataclass(frozen=True)
class SiglipSize:
    """The size of a SigLIP. The default is So400m/14 at 224 pixels, which PaliGemma has."""

    width: int = 1152
    depth: int = 27
    mlp_width: int = 4304
    heads: int = 16
    image: int = 224
    """Height and width of an image."""
    patch: int = 14
    """Height and width of a patch."""

    @property
    def tokens(self) -> int:
        """Patches of an image."""
        return (self.image // self.patch) ** 2


class PatchEmbedding(nn.Conv2d):
    """A convolution without overlap, computed as one matrix product."""

    def __init__(self, width: int, patch: int):
        super().__init__(3, width, patch, stride=patch)
        self.patch = patch

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, patches, width], row by row."""
        rows, columns = images.shape[-2] // self.patch, images.shape[-1] // self.patch
        images = images[..., : rows * self.patch, : columns * self.patch]
        patches = images.unflatten(3, (columns, self.patch)).unflatten(2, (rows, self.patch))
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # [B, patches, 3 * patch^2]
        return F.linear(patches, self.weight.flatten(1), self.bias)


class SiglipEmbeddings(nn.Module):
    """Patches with their positions. An image has as many patches as there are positions."""

    def __init__(self, size: SiglipSize):
        super().__init__()
        self.patch_embedding = PatchEmbedding(size.width, size.patch)
        self.position_embedding = nn.Embedding(size.tokens, size.width)
        nn.init.normal_(self.position_embedding.weight, std=size.width**-0.5)

    def forward(self, images: Tensor) -> Tensor:
        return self.patch_embedding(images) + self.position_embedding.weight


class SiglipMLP(nn.Module):
    def __init__(self, size: SiglipSize):
        super().__init__()
        self.fc1 = nn.Linear(size.width, size.mlp_width)
        self.fc2 = nn.Linear(size.mlp_width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class SiglipLayer(nn.Module):
    def __init__(self, size: SiglipSize):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(size.width, eps=1e-6)
        self.self_attn = EncoderAttention(size.width, size.heads)
        self.layer_norm2 = nn.LayerNorm(size.width, eps=1e-6)
        self.mlp = SiglipMLP(size)

    def forward(self, x: Tensor) -> Tensor:
        dtype = autocast_type(x)  # of the norms' outputs: cast once, for all layers that get them
        x = x + self.self_attn(self.layer_norm1(x).to(dtype))
        return x + self.mlp(self.layer_norm2(x).to(dtype))


class SiglipEncoder(nn.Module):
    def __init__(self, size: SiglipSize):
        super().__init__()
        self.layers = nn.ModuleList(SiglipLayer(size) for _ in range(size.depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class SiglipVision(nn.Module):
    """Images [B, 3, H, W] in -1..1 -> [B, patches, width]."""

    def __init__(self, size: SiglipSize):
        super().__init__()
        self.embeddings = SiglipEmbeddings(size)
        self.encoder = SiglipEncoder(size)
        self.post_layernorm = nn.LayerNorm(size.width, eps=1e-6)
        self.apply(_initialize)

    def forward(self, images: Tensor) -> Tensor:
        return self.post_layernorm(self.encoder(self.embeddings(images)))

    def layers(self) -> list[nn.Module]:
        return list(self.encoder.layers)


def _initialize(module: nn.Module) -> None:
    """Initial values of a SigLIP without pretrained weights."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
