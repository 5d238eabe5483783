"""PaliGemma (Beyer et al. 2024, https://arxiv.org/abs/2407.07726): SigLIP and Gemma.

Parameter names are those of `transformers` and LeRobot's checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from flexor.policies.nn.siglip import SiglipSize, SiglipVision
from flexor.policies.nn.transformer import Transformer, TransformerSize
from flexor.policies.vlm.backbone import PrefixCache, VisionLanguageModel, prefix_positions


def gemma(
    width: int, depth: int, mlp_width: int, heads: int = 8, kv_heads: int = 1, head_dim: int = 256
) -> TransformerSize:
    """The size of a Gemma (Gemma Team 2024, https://arxiv.org/abs/2403.08295)."""
    family = TransformerSize(width, depth, mlp_width, heads, kv_heads, head_dim)
    return replace(family, norm_offset=1.0, activation="gelu", embed_scale=width**0.5)


GEMMA = {
    "gemma_300m": gemma(width=1024, depth=18, mlp_width=4096),
    "gemma_2b": gemma(width=2048, depth=18, mlp_width=16_384),
}


@dataclass(frozen=True)
class PaliGemmaSize:
    language: TransformerSize
    vision: SiglipSize = field(default_factory=SiglipSize)
    vocabulary: int = 257_152


PALIGEMMA = {name: PaliGemmaSize(size) for name, size in GEMMA.items()}

# parameters that stay in float32 in a bfloat16 policy
FLOAT32 = (
    "vision_tower",
    "multi_modal_projector",
    "input_layernorm",
    "post_attention_layernorm",
    "model.norm",
)


class PaliGemma(VisionLanguageModel):
    """Images and text -> a prefix. All its tokens attend to each other."""

    def __init__(self, size: PaliGemmaSize, image: int):
        """`image`: height and width of images."""
        super().__init__()
        vision = SiglipVision(replace(size.vision, image=image))
        self.vision_tower = nn.ModuleDict({"vision_model": vision})
        projector = nn.Linear(size.vision.width, size.language.width)
        self.multi_modal_projector = nn.ModuleDict({"linear": projector})
        self.language_model = Transformer(size.language, size.vocabulary)

    @property
    def decoder(self) -> Transformer:
        return self.language_model

    def encode_images(self, images: Tensor) -> Tensor:
        """Images [N, 3, H, W] in -1..1 -> [N, patches, vision width]."""
        return self.vision_tower["vision_model"](images)

    def embed_features(self, features: Tensor) -> Tensor:
        """[N, patches, vision width] -> [N, patches, D]."""
        return self.multi_modal_projector["linear"](features)

    def image_encoder(self) -> list[nn.Module]:
        return [self.vision_tower]

    def vision_blocks(self) -> list[nn.Module]:
        vision = self.vision_tower["vision_model"]
        assert isinstance(vision, SiglipVision)
        return vision.layers()

    def prefill(
        self,
        images: Tensor,
        tokens: Tensor,
        token_mask: Tensor,
        camera_mask: Tensor | None = None,
        encoded: bool = False,
    ) -> PrefixCache:
        """Images [B, N, 3, H, W], text tokens [B, L], and which of them are not padding: [B, N] and [B, L].

        `encoded`: instead of images, their features [B, N, patches, vision width].
        """
        embed = self.embed_features if encoded else self.embed_images
        image_embeds = embed(images.flatten(0, 1)).unflatten(0, images.shape[:2]).flatten(1, 2)
        text_embeds = self.embed_tokens(tokens).to(image_embeds.dtype)
        x = torch.cat((image_embeds, text_embeds), dim=1)
        image_mask = token_mask.new_ones(image_embeds.shape[:2])
        if camera_mask is not None:
            patches = image_embeds.shape[1] // camera_mask.shape[1]
            image_mask = camera_mask.to(token_mask.dtype).repeat_interleave(patches, dim=1)
        mask = torch.cat((image_mask, token_mask), dim=1)  # [B, P]
        rope = self.decoder.rope(prefix_positions(mask))
        return PrefixCache(self.decoder.prefill(x.to(self.decoder.dtype), rope, mask[:, None, None]), mask)


def cast_selected_to_bf16(network: nn.Module) -> None:
    """Store weights in bfloat16, but for those that need float32."""
    for name, parameter in network.named_parameters():
        if not any(part in name for part in FLOAT32):
            parameter.data = parameter.data.bfloat16()
