"""What vision-language models share.

A policy embeds images and text, prefills the decoder with them, and lets a suffix attend to the cache of this prefix:
further tokens of the same decoder, or those of an action expert with the same heads. The prefix never attends to the
suffix. Rows attend to columns, x is padding:

                image  text  x    suffix
    prefix    |   1     1    0  |  0  0  0
    suffix    |   1     1    0  |  1  0  0     as the policy's `suffix_mask` says,
              |   1     1    0  |  1  1  0     here from left to right
              |   1     1    0  |  1  1  1

Image grids follow from the settings, and positions from the masks, by operations on the device. So a step reads no
value on the host: it can be traced on tensors without memory and captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from flexor.policies.nn.kv_cache import KVCache
from flexor.policies.nn.transformer import Transformer


class PrefixCache(NamedTuple):
    """Keys and values of a prefix in every layer, and which of its tokens are not padding."""

    layers: list[KVCache]
    mask: Tensor  # [B, P]


class VisionLanguageModel(nn.Module):
    """Images and text -> tokens of a decoder."""

    @property
    def decoder(self) -> Transformer:
        raise NotImplementedError

    def embed_images(self, images: Tensor) -> Tensor:
        """Images as the model takes them -> tokens [..., width]."""
        return self.embed_features(self.encode_images(images))

    def encode_images(self, images: Tensor) -> Tensor:
        """Images as the model takes them -> their features, which a linear layer or the decoder takes next."""
        raise NotImplementedError

    def embed_features(self, features: Tensor) -> Tensor:
        """Features of images -> tokens [..., width]."""
        raise NotImplementedError

    def image_encoder(self) -> list[nn.Module]:
        """What `encode_images` consists of."""
        raise NotImplementedError

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Text tokens [B, L] -> [B, L, width]."""
        return self.decoder.embed_tokens(tokens)

    def vision_blocks(self) -> list[nn.Module]:
        raise NotImplementedError

    def blocks(self) -> list[nn.Module]:
        """What is sharded, compiled and recomputed one by one."""
        return [*self.vision_blocks(), *self.decoder.layers]


def prefix_positions(mask: Tensor) -> Tensor:
    """Positions [B, P] of a prefix with this mask [B, P]; padding does not count."""
    return mask.cumsum(1) - 1


def decode_suffix(
    decoder: Transformer, x: Tensor, suffix_mask: Tensor, prefix: PrefixCache, condition: Tensor | None = None
) -> Tensor:
    """Hidden states [B, S, D] of a suffix x [B, S, D].

    It attends to the prefix, and to itself where `suffix_mask` [S or 1, S] is true. Positions continue the prefix's.
    """
    batch, rows = len(x), len(suffix_mask)
    prefix_mask = prefix.mask[:, None].expand(-1, rows, -1)
    mask = torch.cat((prefix_mask, suffix_mask.expand(batch, -1, -1)), dim=2)  # [B, S or 1, P + S]
    positions = prefix.mask.sum(1, keepdim=True) + torch.arange(x.shape[1], device=x.device)
    return decoder(x.to(decoder.dtype), decoder.rope(positions), mask[:, None], prefix.layers, condition)
