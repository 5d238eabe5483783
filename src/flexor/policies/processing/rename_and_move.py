"""Steps that change a batch's names, its batch dimension and its device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from flexor.core.batch import ACTION, IMAGE_FEATURES, IMAGE_PREFIX, Batch
from flexor.policies.processing.pipeline import ACTING, Pipeline, ProcessingStep, StepContext, processing_step

SUFFIXES = ("", "_is_pad", "_padding_mask")  # after the name of an observation: its values, and masks of them


@processing_step("rename_observations_processor")
@dataclass
class RenameObservations(ProcessingStep):
    """Observations under the policy's names. Those that are not in the map keep their names."""

    keeps_values = True
    uses_images = False
    rename_map: dict[str, str] = field(default_factory=dict)

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        names = {f"{a}{end}": f"{b}{end}" for a, b in self.rename_map.items() for end in SUFFIXES}
        return {names.get(key, key): value for key, value in batch.items()}


def renaming_of(pipeline: Pipeline) -> dict[str, str]:
    """The names that the pipeline changes."""
    return next((s.rename_map for s in pipeline.steps if isinstance(s, RenameObservations)), {})


def with_renaming(pipeline: Pipeline, rename_map: Mapping[str, str]) -> Pipeline:
    """The pipeline with these names changed, instead of those that it changed before."""
    steps = [step for step in pipeline.steps if not isinstance(step, RenameObservations)]
    renaming = len(steps) < len(pipeline.steps) or bool(rename_map)
    return replace(pipeline, steps=[RenameObservations(dict(rename_map))] * renaming + steps)


@processing_step("to_batch_processor")
@dataclass
class ToBatch(ProcessingStep):
    """A single observation becomes a batch of one; a batch stays as it is."""

    keeps_values = True
    uses_images = False

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        out = dict(batch)
        for key, value in batch.items():
            single = 3 if key.startswith(IMAGE_PREFIX) else 1
            if isinstance(value, Tensor) and value.dim() == single and _is_vector(key):
                out[key] = value[None]
        if isinstance(batch.get("task"), str):
            out["task"] = [batch["task"]]
        return out


def _is_vector(key: str) -> bool:
    return (key.startswith("observation.") and not key.endswith("_is_pad")) or key == ACTION


@processing_step("lerobot.processor.pipeline.IdentityProcessorStep")  # which has no other name there
@dataclass
class Unchanged(ProcessingStep):
    """Does nothing. LeRobot's reward classifiers end with it."""

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        return batch


@processing_step("device_processor")
@dataclass
class ToDevice(ProcessingStep):
    """Move a batch, then convert it on the device: images are copied as bytes and become floats in [0, 1] there.

    If the next step takes bytes, it converts them, in one pass with what it does.
    """

    device: str = "cpu"
    float_dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = None

    def to(self, device: str) -> None:
        self.device = device

    def split_images(self) -> tuple[ToDevice, ToDevice]:
        return replace(self, device="cpu"), self

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        dtype = getattr(torch, self.float_dtype) if self.float_dtype else torch.float32
        keeps_bytes = context.keeps_bytes and dtype == torch.float32
        return {key: self._move(key, value, dtype, keeps_bytes) for key, value in batch.items()}

    def _move(self, key: str, value: Any, dtype: torch.dtype, keeps_bytes: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.device.type == "cpu" and self.device.startswith("cuda"):
            # From pinned memory the host need not wait until the GPU is done with what it was given before.
            value = (value if value.is_pinned() else value.pin_memory()).to(self.device, non_blocking=True)
        else:
            value = value.to(self.device)  # waits: an action must not be read before it is copied
        if is_byte_image(key, value):
            value = value.contiguous()  # cameras give [H, W, C]: a GPU reorders them faster than a host
            return value if keeps_bytes else float_image(value).to(dtype)
        converted = value.is_floating_point() and not key.startswith(IMAGE_FEATURES)
        return value.to(dtype) if converted else value


def is_byte_image(key: str, value: Any) -> bool:
    return key.startswith(IMAGE_PREFIX) and isinstance(value, Tensor) and value.dtype == torch.uint8


def with_float_images(batch: Batch) -> Batch:
    return {key: float_image(value) if is_byte_image(key, value) else value for key, value in batch.items()}


def float_image(value: Tensor) -> Tensor:
    """From 0 to 1."""
    return torch.div(value, 255)  # bytes become float32 in the same pass
