"""Qwen2.5-VL (Bai et al. 2025, https://arxiv.org/abs/2502.13923): tokens of words and images in one sequence.

A token's position has three parts: time, row and column (M-RoPE). They are equal for words; the tokens of an image lie
on its grid. The grids of an observation's images are fixed, so positions follow from which tokens are images, without
reading any value on the host. Parameter names are those of `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexor.core.errors import ConfigError
from flexor.policies.nn.transformer import Transformer, TransformerSize, language_head
from flexor.policies.sizes import check_model_sizes
from flexor.policies.vlm.backbone import VisionLanguageModel
from flexor.policies.vlm.qwen2_5_images import MERGE, ImageGrid
from flexor.policies.vlm.qwen2_5_vision import QwenVision, QwenVisionSize

IMAGE_START, IMAGE_PAD, IMAGE_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"


@dataclass(frozen=True)
class QwenVLSize:
    vision: QwenVisionSize
    text: TransformerSize
    vocabulary: int
    image_token: int = 151_655
    """The token that stands where an image's tokens go."""
    tied: bool = True
    """Whether the language head has the weight of the embeddings."""


def read_size(config: Mapping[str, Any], source: str) -> QwenVLSize:
    """The size in a config.json of `transformers`, whose text settings may be nested or not; `source` names it."""
    check_model_sizes(source, config)
    try:
        vision, text = config["vision_config"], config.get("text_config") or config
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        if config["model_type"] != "qwen2_5_vl" or text.get("use_sliding_window"):
            raise ValueError("not a Qwen2.5-VL with full attention")
        size = QwenVLSize(
            QwenVisionSize(
                width=vision["hidden_size"],
                depth=vision["depth"],
                mlp_width=vision["intermediate_size"],
                heads=vision["num_heads"],
                output_width=vision["out_hidden_size"],
                window=vision["window_size"],
                full_attention=tuple(vision["fullatt_block_indexes"]),
            ),
            TransformerSize.from_config(
                text,
                qkv_bias=True,
                rope_theta=rope.get("rope_theta") or text.get("rope_theta", 1e6),
                mrope_sections=tuple(rope["mrope_section"]),
            ),
            vocabulary=text["vocab_size"],
            image_token=int(config["image_token_id"]),
            tied=bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings")),
        )
        _check_heads(size)
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{source} does not describe a Qwen2.5-VL: {error!r}") from error
    return size


def _check_heads(size: QwenVLSize) -> None:
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
    if not 0 <= size.image_token < size.vocabulary:
        raise ValueError(f"image_token_id={size.image_token} is none of {size.vocabulary} tokens")


def image_text(tokens: int) -> str:
    """What stands for an image of so many tokens in a prompt."""
    return f"{IMAGE_START}{IMAGE_PAD * tokens}{IMAGE_END}"


class QwenVLModel(nn.Module):
    def __init__(self, size: QwenVLSize, grids: Sequence[ImageGrid]):
        super().__init__()
        self.visual = QwenVision(size.vision, grids)
        self.language_model = Transformer(size.text, size.vocabulary)


class QwenSequence(VisionLanguageModel):
    """Words and images in one sequence, wherever a model has its parts: `vision` and `language_model`."""

    offsets: Tensor
    advances: Tensor

    def __init__(self, size: QwenVLSize, grids: Sequence[ImageGrid]):
        """`grids` of an observation's images, in their order in the prompt."""
        super().__init__()
        self.size = size
        offsets, advances = image_positions(grids)
        self.register_buffer("offsets", offsets, persistent=False)
        self.register_buffer("advances", advances, persistent=False)

    @property
    def vision(self) -> QwenVision:
        raise NotImplementedError

    @property
    def language_model(self) -> Transformer:
        raise NotImplementedError

    @property
    def decoder(self) -> Transformer:
        return self.language_model

    def vision_blocks(self) -> list[nn.Module]:
        return list(self.vision.blocks)

    def encode_images(self, images: Tensor) -> Tensor:
        """Patches of all images, see `QwenImages` -> [B, N, width]."""
        return self.vision(images)

    def embed_features(self, features: Tensor) -> Tensor:
        return features

    def image_encoder(self) -> list[nn.Module]:
        return [self.vision]

    def embed_with_images(self, token_ids: Tensor, images: Tensor) -> Tensor:
        """Tokens [B, S], and the embedded images [B, N, width] that some of them stand for -> [B, S, width]."""
        words = self.embed_tokens(token_ids)
        is_image, number = self._image_tokens(token_ids)
        placed = images.to(words.dtype).gather(1, number[..., None].expand_as(words))
        return torch.where(is_image[..., None], placed, words)

    def positions(self, token_ids: Tensor, valid: Tensor) -> Tensor:
        """Time, row and column [3, B, S] of each token; `valid` [B, S] is False for padding, at either end."""
        return token_positions(*self._image_tokens(token_ids), valid, self.offsets, self.advances)

    def _image_tokens(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        return number_image_tokens(token_ids, self.size.image_token, len(self.advances))


class QwenVL(QwenSequence):
    def __init__(self, size: QwenVLSize, grids: Sequence[ImageGrid]):
        super().__init__(size, grids)
        self.model = QwenVLModel(size, grids)
        self.lm_head = language_head(self.model.language_model, size.tied)

    @property
    def vision(self) -> QwenVision:
        return self.model.visual

    @property
    def language_model(self) -> Transformer:
        return self.model.language_model

    def embed(self, token_ids: Tensor, patches: Tensor) -> Tensor:
        """Tokens [B, S], and patches of the images that some of them stand for -> [B, S, width]."""
        return self.embed_with_images(token_ids, self.embed_images(patches))

    def forward(self, token_ids: Tensor, valid: Tensor, patches: Tensor) -> Tensor:
        """The last hidden states [B, S, width]."""
        rope = self.language_model.rope(self.positions(token_ids, valid))
        return self.language_model(self.embed(token_ids, patches), rope, causal_mask(valid))


def image_positions(grids: Sequence[ImageGrid]) -> tuple[Tensor, Tensor]:
    """For each token of the images: its position after the image's start [3, N]; how far it moves what follows [N]."""
    offsets, advances = [], []
    for grid in grids:
        height, width = grid.rows // MERGE, grid.columns // MERGE
        row = torch.arange(height, device="cpu")[:, None].expand(height, width).flatten()
        column = torch.arange(width, device="cpu").repeat(height)
        offsets.append(torch.stack((torch.zeros_like(row), row, column)))
        advance = torch.zeros_like(row)
        advance[-1] = max(height, width)
        advances.append(advance)
    return torch.cat(offsets, 1), torch.cat(advances)


def number_image_tokens(token_ids: Tensor, image_token: int, count: int) -> tuple[Tensor, Tensor]:
    """Which tokens [B, S] stand for one of `count` tokens of images, and the number of each of those."""
    is_image = token_ids == image_token
    return is_image, (is_image.cumsum(1) - 1).clamp(0, count - 1)


def token_positions(
    is_image: Tensor, number: Tensor, valid: Tensor, offsets: Tensor, advances: Tensor
) -> Tensor:
    """Time, row and column [3, B, S] of tokens, from what `number_image_tokens` and `image_positions` return."""
    advance = torch.where(is_image, advances[number], 1) * valid
    start = advance.cumsum(1) - advance
    return start + torch.where(is_image, offsets[:, number], 0)


def next_positions(positions: Tensor, valid: Tensor, count: int) -> Tensor:
    """Positions [3, B, count] of tokens that follow those at `positions` [3, B, S]."""
    last = positions.masked_fill(~valid, -1).amax((0, 2))  # [B]
    following = last[:, None] + 1 + torch.arange(count, device=last.device)
    return following.expand(3, -1, -1)


def causal_mask(valid: Tensor) -> Tensor:
    """[B, 1, S, S]: tokens attend to themselves and to earlier ones that are not padding (`valid` [B, S])."""
    number = torch.arange(valid.shape[1], device=valid.device)
    earlier = (number[:, None] > number) & valid[:, None, None]
    return earlier | (number[:, None] == number)
