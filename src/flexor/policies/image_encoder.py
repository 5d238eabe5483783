"""The part of a policy that sees each image alone: what its output depends on, and whether it is frozen.

A frozen one makes the same features of an image in every epoch. So a run may compute them once, see
`train/encode_images.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexor.core.tensors import is_sharded
from flexor.policies.nn.autocast import autocast_type
from flexor.policies.processing.pipeline import Pipeline

__all__ = ["ImageEncoder", "digest_of", "for_linear_layer", "image_steps"]


class ImageEncoder(NamedTuple):
    """What `Policy.encode_images` depends on."""

    modules: Sequence[nn.Module]
    """All modules that it uses."""
    settings: Mapping[str, Any]
    """Settings that change its output, such as the size that images are resized to. Plain data."""
    is_random: bool = False
    """Whether it crops or drops something by chance in training."""

    @property
    def is_frozen(self) -> bool:
        return not any(weight.requires_grad for module in self.modules for weight in module.parameters())


def image_steps(pipeline: Pipeline) -> Pipeline | None:
    """The part of a policy's processing that changes images, which have the policy's names; None if a step needs more
    than images for that."""
    halves = [step.split_images() for step in pipeline.steps]
    if any(half is None for half in halves):
        return None
    return Pipeline(pipeline.name, [half[1] for half in halves if half is not None and half[1] is not None])


def for_linear_layer(features: Tensor) -> Tensor:
    """Features that a linear layer takes next: under autocast in the type in which it computes, which loses nothing."""
    return features.to(autocast_type(features))


def digest_of(encoder: ImageEncoder, processing: Pipeline) -> str:
    """A hash of all weights and settings that features depend on. All ranks of a sharded policy call it together."""
    content = hashlib.sha256()
    steps = [{"name": step.name, **step.config(), "device": None} for step in processing.steps]
    content.update(json.dumps([encoder.settings, steps], sort_keys=True, default=str).encode())
    states = [step.state() for step in processing.steps]
    for name, tensor in [*_tensors(encoder.modules), *(each for state in states for each in state.items())]:
        content.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        content.update(_bytes(tensor))
    return content.hexdigest()


def _tensors(modules: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for number, module in enumerate(modules):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield f"{number}.{name}", tensor


def _bytes(tensor: Tensor) -> Any:
    """The values of all ranks, as they are in memory."""
    gathered = tensor.full_tensor() if is_sharded(tensor) else tensor
    on_host = gathered.detach().cpu().contiguous()
    return on_host.reshape(-1).view(torch.uint8).numpy()
