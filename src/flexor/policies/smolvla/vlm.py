"""SmolVLM2 (https://arxiv.org/abs/2504.05299): SigLIP sees, a small Llama reads what it saw and the task.

Only what SmolVLA needs: keys and values of the first layers for a prefix of images, words and state. There is no text
to write, so the last layer's output, the last norm and the head are not computed. They are parameters all the same,
never trained: LeRobot's checkpoints hold them. Parameter names, and their order, are LeRobot's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flexor.core.errors import ConfigError
from flexor.policies.nn.siglip import SiglipSize, SiglipVision
from flexor.policies.nn.transformer import Transformer, TransformerLayer, init_decoder
from flexor.policies.smolvla.vlm_size import VlmSize


class SmolVLM(nn.Module):
    def __init__(self, size: VlmSize, image: int | None):
        """`image`: height and width of images, if they are not those that the encoder was trained on."""
        super().__init__()
        self.size = size
        self.model = SmolVLMModel(size, image)
        self.lm_head = nn.Linear(size.text.width, size.vocabulary, bias=False)
        init_decoder(self.lm_head)

    def see(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in -1..1 -> tokens [B, T, width], scaled as words are."""
        return self.model.connector(self.model.vision_model(images)) * self.size.text.width**0.5

    def read(self, words: Tensor) -> Tensor:
        """Words [B, L] -> tokens [B, L, width]."""
        return self.model.text_model.embed_tokens(words) * self.size.text.width**0.5

    def layers(self) -> list[nn.Module]:
        return [*self.model.vision_model.layers(), *self.model.text_model.layers]


class SmolVLMModel(nn.Module):
    def __init__(self, size: VlmSize, image: int | None):
        super().__init__()
        self.vision_model = SmolVLMVision(size.vision, image or size.vision.image, size.shuffle)
        self.connector = Connector(size)
        self.text_model = Transformer(size.text, size.vocabulary)


class SmolVLMVision(SiglipVision):
    """SigLIP for square images of any size: in another than its own, patches have the nearest positions to theirs."""

    nearest: Tensor | None

    def __init__(self, size: SiglipSize, image: int, shuffle: int):
        super().__init__(size)
        side, patches = size.image // size.patch, image // size.patch
        if not patches or patches % shuffle:
            raise ConfigError(
                f"Images of {image} x {image} pixels have {patches} x {patches} patches, which must be a multiple of "
                f"{shuffle}: set --policy.resize_imgs_with_padding='[{size.image}, {size.image}]'."
            )
        nearest = None if patches == side else _nearest(side, patches)
        self.register_buffer("nearest", nearest, persistent=False)
        for layer in self.encoder.layers:
            assert isinstance(layer, nn.Module)
            _reorder(layer, "self_attn", "layer_norm1", "mlp", "layer_norm2")

    def forward(self, images: Tensor) -> Tensor:
        if self.nearest is None:
            return super().forward(images)
        positions = self.embeddings.position_embedding(self.nearest)
        return self.post_layernorm(self.encoder(self.embeddings.patch_embedding(images) + positions))


def _nearest(side: int, patches: int) -> Tensor:
    """The position [patches^2] of each patch in a grid of side x side; rounded as SmolVLM2's authors do."""
    starts = torch.arange(1 / side, 1.0, 1 / side, device="cpu")
    at = (torch.arange(patches, dtype=torch.float32, device="cpu") * (1 / patches)).clamp(max=1 - 1e-6)
    where = torch.bucketize(at, starts, right=True)
    return (where[:, None] * side + where).flatten()


def _reorder(module: nn.Module, *names: str) -> None:
    """LeRobot numbers parameters in its own order, by which an optimizer's state is saved."""
    module._modules = {name: module._modules[name] for name in names}


class Connector(nn.Module):
    """Neighbouring patches become one token of the language model."""

    def __init__(self, size: VlmSize):
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


def freeze_vlm(vlm: SmolVLM, used: int, *, vision: bool, everything: bool) -> None:
    """Freeze what the settings say, what LeRobot never trains, and what the loss does not reach.

    `used` layers of the language model have an effect, the last one only through its keys and values.
    """
    if vision:
        vlm.model.vision_model.requires_grad_(False)
    if everything:
        vlm.requires_grad_(False)
        return
    text = vlm.model.text_model
    vlm.lm_head.requires_grad_(False)
    text.norm.requires_grad_(False)
    depth = len(text.layers)
    for number in range(depth):
        layer = text.layers[number]
        assert isinstance(layer, TransformerLayer)
        if number >= used or number == depth - 1 or (used != depth and number == depth - 2):
            layer.requires_grad_(False)
        elif number == used - 1:
            for part in (layer.mlp, layer.post_attention_layernorm, layer.self_attn.q_proj):
                part.requires_grad_(False)
            layer.self_attn.o_proj.requires_grad_(False)
