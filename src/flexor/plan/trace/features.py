"""Features of images in a rehearsed step: what they are, and batches that have them instead of images."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flexor.config.schema import TrainConfig
from flexor.core.batch import IMAGE_FEATURES, Batch
from flexor.data.frames.features import FeatureFormat
from flexor.data.loader.to_gpu import Staged
from flexor.policies.base import Policy
from flexor.policies.image_encoder import encode
from flexor.policies.processing.pipeline import Pipeline
from flexor.train.engine.base import Engine
from flexor.train.image_features import not_possible, why_not_encoded


def reads_features(config: TrainConfig) -> bool:
    """Whether the settings, as they are, let steps read features of images. Plans settle `auto` before."""
    return config.dataset.cache.features in ("ram", "disk", "gpu")


def why_not_once(config: TrainConfig, policy: Policy, processing: Pipeline) -> str | None:
    """Why the run can't encode each image once, before its first step; None if it can."""
    return why_not_encoded(policy, processing, config.dataset.image_transforms.enable)


def check_encoded_once(config: TrainConfig, policy: Policy, processing: Pipeline) -> None:
    """Refuse settings that ask for features which the run can't have."""
    reason = why_not_once(config, policy, processing)
    if reason is not None:
        raise not_possible(config.dataset.cache.features, reason)


def formats_of(policy: Policy, engine: Engine, count: int = 1) -> dict[str, FeatureFormat]:
    """The features of each camera, by the policy's names: encodes `count` black images of each."""
    formats = {}
    for camera, feature in policy.config.images.items():
        images = torch.zeros(count, *feature.shape, device=engine.device)
        with engine.autocast():
            features = encode(policy.encode_images, images)
        formats[camera] = FeatureFormat(
            tuple(features.shape[1:]), features.dtype, f"{IMAGE_FEATURES}{camera}"
        )
    return formats


def with_features(batch: Batch, formats: Mapping[str, FeatureFormat]) -> Batch:
    """A batch on its way to a GPU, with features instead of images."""
    changed: Batch = {}
    for name, value in batch.items():
        if name in formats and isinstance(value, Staged):
            format, rows = formats[name], len(value.host)
            host = torch.zeros((rows, format.nbytes), dtype=torch.uint8, pin_memory=value.host.is_pinned())
            changed[format.name] = Staged(format, value.index, host)
        else:
            changed[name] = value
    return changed
