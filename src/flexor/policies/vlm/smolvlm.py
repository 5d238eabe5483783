"""SmolVLM2 (https://arxiv.org/abs/2504.05299): SigLIP and a small Llama.

The language head is a parameter that nothing uses: LeRobot's checkpoints hold it. Parameter names, and their order, are
LeRobot's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flexor.core.errors import ConfigError
from flexor.policies.nn.siglip import SiglipSize, SiglipVision
from flexor.policies.nn.transformer import Transformer, init_decoder, round_in_bf16
from flexor.policies.vlm.backbone import VisionLanguageModel
from flexor.policies.vlm.smolvlm_size import SmolVLMSize


class SmolVLM(VisionLanguageModel):
    def __init__(self, size: SmolVLMSize, image: int | None):
        """`image`: height and width of images, if they are not those that the encoder was trained on."""
        super().__init__()
        self.size = size
        self.image_scale = size.text.width**0.5
        self.model = SmolVLMModel(size, image)
        self.lm_head = nn.Linear(size.text.width, size.vocabulary, bias=False)
        init_decoder(self.lm_head)

    @property
    def decoder(self) -> Transformer:
        return self.model.text_model

    def encode_images(self, images: Tensor) -> Tensor:
        """Images [N, 3, H, W] in -1..1 -> [N, T, width], or [N, patches, vision width] if the connector is trained."""
        patches = self.model.vision_model(images)
        return self._connect(patches) if self._connector_is_frozen else patches

    def embed_features(self, features: Tensor) -> Tensor:
        """-> [N, T, width]."""
        return features if self._connector_is_frozen else self._connect(features)

    def image_encoder(self) -> list[nn.Module]:
        return [self.model.vision_model, *([self.model.connector] if self._connector_is_frozen else [])]

    @property
    def _connector_is_frozen(self) -> bool:
        """Then its output is encoded: it has fewer and narrower tokens than its input."""
        return not any(weight.requires_grad for weight in self.model.connector.parameters())

    def _connect(self, patches: Tensor) -> Tensor:
        """[N, patches, vision width] -> [N, T, width], scaled as text is."""
        return self.model.connector(patches) * self.image_scale

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        return super().embed_tokens(tokens) * self.size.text.width**0.5

    def vision_blocks(self) -> list[nn.Module]:
        return self.model.vision_model.layers()

    def round_in_bf16(self) -> None:
        """For weights in bfloat16 without autocast: round where LeRobot and `transformers` do."""
        round_in_bf16(self.decoder)
        self.model.vision_model.round_in_bf16()
        self.image_scale = float(torch.tensor(self.image_scale, dtype=torch.bfloat16, device="cpu"))


class SmolVLMModel(nn.Module):
    def __init__(self, size: SmolVLMSize, image: int | None):
        super().__init__()
        self.vision_model = SmolVLMVision(size.vision, image or size.vision.image, size.shuffle)
        self.connector = Connector(size)
        self.text_model = Transformer(size.text, size.vocabulary)


class SmolVLMVision(SiglipVision):
    """SigLIP for square images of any size: patches of other sizes take the nearest trained positions."""

    nearest: Tensor | None

    def __init__(self, size: SiglipSize, image: int, shuffle: int):
        super().__init__(size)
        side, patches = size.image // size.patch, image // size.patch
        if not patches or patches % shuffle:
            raise ConfigError(
                f"Images of {image} x {image} pixels have {patches} x {patches} patches, which must be a multiple of "
                f"{shuffle}: set --policy.resize_imgs_with_padding='[{size.image}, {size.image}]'."
            )
        self.sides = side, patches
        nearest = None if patches == side else _nearest(side, patches)
        self.register_buffer("nearest", nearest, persistent=False)
        for layer in self.encoder.layers:
            assert isinstance(layer, nn.Module)
            _reorder(layer, "self_attn", "layer_norm1", "mlp", "layer_norm2")

    def round_in_bf16(self) -> None:
        """With rounded fractions, patches take other positions, unless the grid has 4, 8, 16 or 32 rows."""
        self.nearest = _nearest(*self.sides, torch.bfloat16)

    def forward(self, images: Tensor) -> Tensor:
        images = images.to(self.embeddings.patch_embedding.weight.dtype)
        if self.nearest is None:
            return super().forward(images)
        positions = self.embeddings.position_embedding(self.nearest)
        return self.post_layernorm(self.encoder(self.embeddings.patch_embedding(images) + positions))


def _nearest(side: int, patches: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The position [patches^2] of each patch in a grid of side x side; rounded as SmolVLM2's authors do."""
    boundaries = torch.arange(1 / side, 1.0, 1 / side, device="cpu")
    fractions = (torch.arange(patches, dtype=torch.float32, device="cpu") * (1 / patches)).clamp(max=1 - 1e-6)
    index = torch.bucketize(fractions.to(dtype), boundaries, right=True)
    return (index[:, None] * side + index).flatten()


def _reorder(module: nn.Module, *names: str) -> None:
    """LeRobot numbers parameters in its own order, by which an optimizer's state is saved."""
    module._modules = {name: module._modules[name] for name in names}


class Connector(nn.Module):
    """Neighbouring patches become one token of the language model."""

    def __init__(self, size: SmolVLMSize):
        super().__init__()
        self.shuffle = size.shuffle
        projection = nn.Linear(size.vision.width * size.shuffle**2, size.text.width, bias=False)
        self.modality_projection = nn.ModuleDict({"proj": projection})
        init_decoder(projection)

    def forward(self, patches: Tensor) -> Tensor:
        """[B, patches, width] -> [B, patches / shuffle^2, text width]."""
        side = int(patches.shape[1] ** 0.5)
        blocks = side // self.shuffle
        grid = patches.unflatten(1, (blocks, self.shuffle, blocks, self.shuffle))
        return self.modality_projection["proj"](grid.transpose(2, 3).flatten(3).flatten(1, 2))
