"""The part of a policy's processing that the loader's threads run while the GPU computes."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace

from flexor.core.batch import SAMPLE_ID, Batch
from flexor.core.rng import Noise
from flexor.policies.processing.pipeline import Pipeline, ProcessingStep, StepContext
from flexor.policies.processing.rename_and_move import ToDevice


@dataclass(frozen=True)
class HostPipeline:
    """Processing of training batches in host memory: see `data.loader.assemble.HostPipeline`."""

    pipeline: Pipeline
    uses_images: bool
    seed: int = 0

    def __call__(self, batch: Batch, step: int) -> Batch:
        noise = Noise(self.seed, step, batch[SAMPLE_ID])
        return self.pipeline(batch, StepContext(training=True, noise=noise))


def split_processing(pipeline: Pipeline, seed: int = 0) -> tuple[HostPipeline | None, Pipeline]:
    """The steps up to the last one that works on the host, if there is one, and those that are left for the device.

    Images are left for the device, unless a step of the first part needs them there.
    """
    count = max((n for n, step in enumerate(pipeline.steps, 1) if step.on_host), default=0)
    before, after = pipeline.steps[:count], pipeline.steps[count:]
    if not before:
        return None, pipeline
    halves = [step.split_images() for step in before]
    separable = [half for half in halves if half is not None]
    uses_images = len(separable) < len(halves)
    on_host: list[ProcessingStep]
    on_device: list[ProcessingStep]
    if uses_images:
        on_host = [_on_cpu(step) for step in before]
        on_device = [step for step in before if isinstance(step, ToDevice)]
    else:
        on_host = [values for values, _ in separable if values is not None]
        on_device = [images for _, images in separable if images is not None]
    host_steps = HostPipeline(replace(pipeline, steps=on_host), uses_images, seed)
    return host_steps, replace(pipeline, steps=[*on_device, *after])


def _on_cpu(step: ProcessingStep) -> ProcessingStep:
    step = copy(step)
    step.to("cpu")
    return step
