"""What policies on PaliGemma do alike: their settings of the network, and the prefix of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flexor.core.batch import Batch
from flexor.policies.image_encoder import ImageEncoder, for_linear_layer
from flexor.policies.nn.recompute import recompute
from flexor.policies.processing.tokenize import TASK_MASK, TASK_TOKENS
from flexor.policies.vlm.backbone import PrefixCache
from flexor.policies.vlm.cameras import prepare_cameras, prepare_images
from flexor.policies.vlm.paligemma import PaliGemma, cast_selected_to_bf16
from flexor.policies.vlm.paligemma_config import PaliGemmaConfig


def apply_settings(config: PaliGemmaConfig, network: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """The type of the network's weights, and how its blocks are computed."""
    if config.dtype == "bfloat16":
        cast_selected_to_bf16(network)
    for block in blocks:
        if config.gradient_checkpointing:
            recompute(block)
        if config.compile_model:
            block.forward = torch.compile(block.forward, mode=config.compile_mode)


def prefill_batch(model: PaliGemma, config: PaliGemmaConfig, batch: Batch) -> PrefixCache:
    """The cache of a batch's images and prompts."""
    cameras = prepare_cameras(config.type, [*config.images], batch, config.image_resolution, "centre")
    return model.prefill(
        cameras.stacked(), batch[TASK_TOKENS], batch[TASK_MASK], cameras.stacked_masks(), cameras.encoded
    )


def image_encoder(model: PaliGemma, config: PaliGemmaConfig) -> ImageEncoder:
    """What `encode_images` depends on."""
    return ImageEncoder(model.image_encoder(), {"image_resolution": config.image_resolution})


def encode_images(model: PaliGemma, config: PaliGemmaConfig, images: Tensor) -> Tensor:
    """Images of one camera [B, 3, H, W] in 0..1 -> the features that `prefill_batch` takes instead of them."""
    prepared = prepare_images(images, config.image_resolution, "centre")
    return for_linear_layer(model.encode_images(prepared))
