"""Qwen3-VL (Bai et al. 2025, https://arxiv.org/abs/2511.21631): tokens of words and images in one sequence.

Positions have three parts, as in Qwen2.5-VL. All prompts begin alike, up to the end of the images, and padding comes
last: so images are at the same places in all samples. Parameter names are those of `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexor.core.errors import ConfigError
from flexor.policies.nn.autocast import autocast_type
from flexor.policies.nn.transformer import Transformer, TransformerSize, language_head
from flexor.policies.sizes import check_model_sizes
from flexor.policies.vlm.backbone import VisionLanguageModel
from flexor.policies.vlm.qwen2_5_images import ImageGrid
from flexor.policies.vlm.qwen2_5_vl import (
    causal_mask,
    image_positions,
    number_image_tokens,
    token_positions,
)
from flexor.policies.vlm.qwen3_vision import Qwen3Vision, Qwen3VisionSize


@dataclass(frozen=True)
class Qwen3VLSize:
    vision: Qwen3VisionSize
    text: TransformerSize
    vocabulary: int
    image_token: int = 151_655
    """The token that stands where an image's tokens go."""

    def with_layers(self, layers: int) -> Qwen3VLSize:
        """With the first layers of the decoder only."""
        return replace(self, text=replace(self.text, depth=min(layers, self.text.depth)))


def read_qwen3_size(config: Mapping[str, Any], source: str) -> Qwen3VLSize:
    """The size in a config.json of `transformers`; `source` names it."""
    check_model_sizes(source, config)
    try:
        vision, text = config["vision_config"], config["text_config"]
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        if config["model_type"] != "qwen3_vl":
            raise ValueError(f"its model_type is {config['model_type']!r}, not 'qwen3_vl'")
        patch = vision.get("patch_size"), vision.get("spatial_merge_size"), vision.get("temporal_patch_size")
        if patch != (16, 2, 2):
            raise ValueError(
                f"patch_size, spatial_merge_size, temporal_patch_size are {patch}, not (16, 2, 2)"
            )
        size = Qwen3VLSize(
            Qwen3VisionSize(
                width=vision["hidden_size"],
                depth=vision["depth"],
                mlp_width=vision["intermediate_size"],
                heads=vision["num_heads"],
                output_width=vision["out_hidden_size"],
                positions=int(vision["num_position_embeddings"] ** 0.5),
                deepstack=tuple(vision["deepstack_visual_indexes"]),
            ),
            TransformerSize.from_config(
                text,
                qk_norm=True,
                rope_theta=rope.get("rope_theta") or text.get("rope_theta", 5e6),
                mrope_sections=tuple(rope["mrope_section"]),
                mrope_interleaved=True,
            ),
            vocabulary=text["vocab_size"],
            image_token=int(config["image_token_id"]),
        )
        _check(size)
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{source} does not describe a Qwen3-VL: {error!r}") from error
    return size


def _check(size: Qwen3VLSize) -> None:
    """Refuse sizes that do not go together."""
    vision, text = size.vision, size.text
    if vision.output_width != text.width:
        raise ValueError(f"out_hidden_size={vision.output_width} is not hidden_size={text.width}")
    if vision.width % (4 * vision.heads):
        raise ValueError(
            f"the vision's hidden_size={vision.width} is no multiple of 4 x num_heads={vision.heads}"
        )
    if text.heads % text.kv_heads:
        raise ValueError(f"num_attention_heads={text.heads} is no multiple of {text.kv_heads}, those of keys")
    if 2 * sum(text.mrope_sections or ()) != text.head_dim:
        raise ValueError(
            f"mrope_section={text.mrope_sections} has not half of a head's {text.head_dim} channels"
        )
    if not all(0 <= block < vision.depth for block in vision.deepstack):
        raise ValueError(f"deepstack_visual_indexes={vision.deepstack} are none of {vision.depth} blocks")
    if not 0 <= size.image_token < size.vocabulary:
        raise ValueError(f"image_token_id={size.image_token} is none of {size.vocabulary} tokens")


class TokenPlaces(NamedTuple):
    """Where in all sequences of a batch tokens of images are, and all others."""

    images: Tensor  # [N]
    rest: Tensor  # [S - N]


class Qwen3VLModel(nn.Module):
    def __init__(self, size: Qwen3VLSize, grids: Sequence[ImageGrid]):
        super().__init__()
        self.visual = Qwen3Vision(size.vision, grids)
        self.language_model = Transformer(size.text, size.vocabulary)


class Qwen3VL(VisionLanguageModel):
    offsets: Tensor
    advances: Tensor

    def __init__(self, size: Qwen3VLSize, grids: Sequence[ImageGrid]):
        """`grids` of an observation's images, in their order in the prompt."""
        super().__init__()
        self.size = size
        self.model = Qwen3VLModel(size, grids)
        self.lm_head = language_head(self.model.language_model, tied=True)
        self.language_model.embed_tokens.rounds_output = True
        offsets, advances = image_positions(grids)
        self.register_buffer("offsets", offsets, persistent=False)
        self.register_buffer("advances", advances, persistent=False)

    @property
    def language_model(self) -> Transformer:
        return self.model.language_model

    @property
    def decoder(self) -> Transformer:
        return self.language_model

    def vision_blocks(self) -> list[nn.Module]:
        return list(self.model.visual.blocks)

    def image_encoder(self) -> list[nn.Module]:
        return [self.model.visual]

    def places(self, token_ids: Tensor) -> TokenPlaces:
        """Of tokens [B, S], whose images are at the same places in all samples. Nothing is read on the host."""
        is_other = (token_ids[0] != self.size.image_token).to(torch.int8)
        order = is_other.argsort(stable=True)
        count = len(self.advances)
        return TokenPlaces(order[:count], order[count:])

    def hidden(self, token_ids: Tensor, valid: Tensor, features: Tensor) -> Tensor:
        """Hidden states [B, S, width] after the last layer, before the last norm.

        Tokens [B, S]; `valid` [B, S] is False for padding, which comes last; features of all images
        [B, N, feature_width].
        """
        decoder, images = self.language_model, self.places(token_ids).images
        width = self.size.text.width
        x = self.embed_tokens(token_ids)
        x = x.to(autocast_type(x))
        tokens, *early = features.to(x.dtype).split(width, -1)
        x = x.index_copy(1, images, tokens).to(decoder.dtype)
        numbers = number_image_tokens(token_ids, self.size.image_token, len(self.advances))
        rope = decoder.rope(token_positions(*numbers, valid, self.offsets, self.advances))
        mask = decoder.size.grouped(causal_mask(valid))
        for number, layer in enumerate(decoder.layers):
            if 0 < number <= len(early):  # what is added after the last layer comes too late to be used
                x = x.index_add(1, images, early[number - 1].to(x.dtype))
            x, _ = layer(x, rope, mask)
        return x

    def freeze_unused(self) -> None:
        """Exclude from training what `hidden` does not use: DDP expects a gradient of everything else."""
        self.language_model.norm.requires_grad_(False)
        for number, merger in enumerate(self.model.visual.deepstack_merger_list):
            if number + 1 >= len(self.language_model.layers):
                merger.requires_grad_(False)
