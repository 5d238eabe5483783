"""PaliGemma (Beyer et al. 2024, https://arxiv.org/abs/2407.07726), and the expert that acts on what it reads.

Parameter names are those of LeRobot's checkpoints. These also have two language heads, which nothing uses: see
`PI_NAMES` in policy.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flexor.policies.nn.kv_cache import KVCache
from flexor.policies.nn.siglip import SiglipSize, SiglipVision
from flexor.policies.nn.transformer import Transformer, TransformerSize


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

# of a policy in bfloat16, what stays in float32
EXACT = ("vision_tower", "multi_modal_projector", "input_layernorm", "post_attention_layernorm", "model.norm")


class Prompt(NamedTuple):
    """What PaliGemma has read: keys and values of every layer, and which tokens are there, [B, P]."""

    layers: list[KVCache]
    there: Tensor


class PaliGemma(nn.Module):
    """Images and text -> a prompt."""

    def __init__(self, size: PaliGemmaSize, image: int):
        super().__init__()
        vision = SiglipVision(replace(size.vision, image=image))
        self.vision_tower = nn.ModuleDict({"vision_model": vision})
        projector = nn.Linear(size.vision.width, size.language.width)
        self.multi_modal_projector = nn.ModuleDict({"linear": projector})
        self.language_model = Transformer(size.language, size.vocabulary)
        self.language_model.freeze_unused_by_prefill()

    def see(self, images: Tensor) -> Tensor:
        """Images [B, N, 3, H, W] in -1..1 -> [B, N * patches, D]."""
        patches = self.vision_tower["vision_model"](images.flatten(0, 1))
        return self.multi_modal_projector["linear"](patches).unflatten(0, images.shape[:2]).flatten(1, 2)

    def read(self, images: Tensor, tokens: Tensor, mask: Tensor, cameras: Tensor | None = None) -> Prompt:
        """Images [B, N, 3, H, W], tokens [B, L] and which of them are there [B, L]. All see each other.

        `cameras` [B, N]: which images are there; None: all.
        """
        seen = self.see(images)
        x = torch.cat((seen, self.language_model.embed_tokens(tokens).to(seen.dtype)), dim=1)
        shown = mask.new_ones(seen.shape[:2])
        if cameras is not None:
            shown = cameras.to(mask.dtype).repeat_interleave(seen.shape[1] // cameras.shape[1], dim=1)
        there = torch.cat((shown, mask), dim=1)
        language = self.language_model
        rope = language.rope(there.cumsum(1) - 1)
        return Prompt(language.prefill(x.to(language.dtype), rope, there[:, None, None]), there)


class PaliGemmaWithExpert(nn.Module):
    """PaliGemma reads, the expert acts. With a condition, the norms of the expert depend on it."""

    def __init__(self, size: PaliGemmaSize, expert: TransformerSize, image: int):
        super().__init__()
        self.paligemma = nn.ModuleDict({"model": PaliGemma(size, image)})
        self.gemma_expert = nn.ModuleDict({"model": Transformer(expert)})

    @property
    def reader(self) -> PaliGemma:
        return self.paligemma["model"]  # type: ignore[return-value]

    @property
    def expert(self) -> Transformer:
        return self.gemma_expert["model"]  # type: ignore[return-value]

    def act(self, x: Tensor, among: Tensor, prompt: Prompt, condition: Tensor | None = None) -> Tensor:
        """x [B, S, D] -> [B, S, D]. It attends to the prompt, and to itself where `among` [S or 1, S] is true."""
        batch, rows = len(x), len(among)
        prompted = prompt.there[:, None].expand(-1, rows, -1)
        mask = torch.cat((prompted, among.expand(batch, -1, -1)), dim=2)[:, None]  # [B, 1, S or 1, P + S]
        positions = prompt.there.sum(1, keepdim=True) + torch.arange(x.shape[1], device=x.device)
        expert = self.expert
        return expert(x.to(expert.dtype), expert.rope(positions), mask, prompt.layers, condition)

    def blocks(self) -> list[nn.Module]:
        reader = self.reader
        vision = reader.vision_tower["vision_model"]
        assert isinstance(vision, SiglipVision)
        language = [reader.language_model.embed_tokens, *reader.language_model.layers]
        return [*vision.layers(), *language, *self.expert.layers]


def lower(network: nn.Module) -> None:
    """Store weights in bfloat16, but for those that need float32."""
    for name, parameter in network.named_parameters():
        if not any(part in name for part in EXACT):
            parameter.data = parameter.data.bfloat16()
