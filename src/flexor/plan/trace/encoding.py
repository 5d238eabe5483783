"""What it takes to encode images apart from a step: whether a run can, what features are, and the operations."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from flexor.config.for_gpu import settle_for_gpu
from flexor.config.schema import TrainConfig
from flexor.data.frames.features import FeatureFormat
from flexor.plan.trace.cuda_on_meta import Card, CudaOnMeta, like_in_kernels
from flexor.plan.trace.features import formats_of, why_not_once
from flexor.plan.trace.ops import Op
from flexor.plan.trace.rehearsal import META, policy_on, rehearsed_processing
from flexor.plan.trace.shortcuts import without_compiler
from flexor.plan.trace.trace import OperationTracker
from flexor.policies import policy_class
from flexor.policies.base import Policy
from flexor.train.encode_images import CHUNK
from flexor.train.engine.base import Engine

NOTHING = "the policy has no image encoder"


class Encoding(NamedTuple):
    """Of a run's images, apart from its steps."""

    why_not: str | None
    """Why each image can't be encoded once."""
    formats: dict[str, FeatureFormat]
    """Of each camera, by the policy's names."""
    ops: list[Op]
    """To encode CHUNK images of every camera."""


_traced: dict[tuple[str, str, object], Encoding] = {}
_refused: dict[str, Encoding] = {}  # by settings: the reason depends on no GPU


def trace_encoding(config: TrainConfig, gpu: Card) -> Encoding:
    """Encode images of a run on the meta device. The policy's features must be filled in."""
    kind = policy_class(config.policy.type)
    if kind.image_encoder is Policy.image_encoder or not config.policy.images:
        return Encoding(NOTHING, {}, [])
    config = settle_for_gpu(config, gpu.compute_capability)
    parts = (config.policy, config.lora, config.weights_dtype, config.ema.enable)
    settings = repr((*parts, config.parallel.strategy, config.dataset.image_transforms))
    if settings in _refused:
        return _refused[settings]
    key = (settings, config.precision, like_in_kernels(gpu.compute_capability))
    if key not in _traced:
        _traced[key] = _trace(config, gpu)
    if _traced[key].why_not is not None:
        _refused[settings] = _traced[key]
    return _traced[key]


@without_compiler()
def _trace(config: TrainConfig, gpu: Card) -> Encoding:
    tracker, cuda = OperationTracker("meta", gpu.compute_capability), CudaOnMeta(gpu.compute_capability)
    with torch.random.fork_rng(devices=[]), tracker, cuda.active():
        tracker.phase = "host"
        policy = policy_on(replace(config, compile=False))
        reason = why_not_once(config, policy, rehearsed_processing(config.policy))
        if reason is not None:
            return Encoding(reason, {}, [])
        tracker.phase = "forward"
        formats = formats_of(policy, Engine(META, config.precision), CHUNK)
    return Encoding(None, formats, tracker.ops)
