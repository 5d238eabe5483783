"""The processing step that augments images. It is part of training only: checkpoints do not have it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

import flexor.kernels.augment  # noqa: F401 (defines the operators)
from flexor.core.batch import Batch
from flexor.core.errors import ConfigError
from flexor.core.rng import Noise
from flexor.data.settings import ImageTransformsConfig
from flexor.kernels.available import has_kernels
from flexor.policies.augment.arguments import WHERE
from flexor.policies.augment.draw import SampledOps, TransformSampler
from flexor.policies.augment.operations import ImageOp, Transform, read_transforms
from flexor.policies.augment.plain import apply_slot
from flexor.policies.features import PolicyFeature
from flexor.policies.processing.pipeline import ACTING, Pipeline, ProcessingStep, StepContext
from flexor.policies.processing.rename_and_move import ToDevice, float_image, with_float_images

CHANNELS = (1, 3)


class AugmentImages(ProcessingStep):
    """Images of bytes or floats in [0, 1] -> augmented floats in [0, 1]. Other cameras stay as they are."""

    takes_bytes = True

    def __init__(self, settings: ImageTransformsConfig, cameras: Mapping[str, PolicyFeature]):
        transforms = read_transforms(settings)
        self.cameras = list(cameras)
        sizes = [(feature.shape[1], feature.shape[2]) for feature in cameras.values()]
        operations = [operation for each in transforms for operation in each.operations]
        self.used = {operation.op for operation in operations}
        self.reach = max((max(o.kernel) // 2 for o in operations if o.op is ImageOp.BLUR), default=0)
        _check_sizes(transforms, cameras)
        self.draw = TransformSampler(transforms, settings.max_num_transforms, settings.random_order, sizes)

    def to(self, device: str) -> None:
        self.draw.tables(torch.device(device))

    def split_images(self) -> tuple[None, AugmentImages]:
        return None, self

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        if not context.training:
            return batch
        cameras = [name for name in self.cameras if isinstance(batch.get(name), Tensor)]
        out = dict(batch)
        if cameras:
            images = batch[cameras[0]]
            assert context.noise is not None, "augmentation needs keyed noise"
            noise = context.noise
            if isinstance(noise, Noise) and noise.sample_ids.device != images.device:
                noise = noise.to(images.device)
            sampled = self.draw(noise, len(images), images.device)
        for name in cameras:
            out[name] = self._augmented(out[name], sampled, self.cameras.index(name))
        return out if context.keeps_bytes else with_float_images(out)

    def _augmented(self, images: Tensor, sampled: SampledOps, camera: int) -> Tensor:
        shape = images.shape
        images = images.reshape(shape[0], -1, *shape[-3:]).contiguous()  # [B, T, C, H, W]
        apply = self._fused if has_kernels(images.device) else self._plain
        for slot in range(self.draw.slots):
            images = apply(images, sampled, camera, slot)
        return (float_image(images) if images.dtype == torch.uint8 else images).view(shape)

    def _plain(self, images: Tensor, sampled: SampledOps, camera: int, slot: int) -> Tensor:
        images = float_image(images) if images.dtype == torch.uint8 else images.float()
        draws = sampled.ops[:, camera, slot], sampled.numbers[:, camera, slot]
        seeds = None if sampled.seeds is None else sampled.seeds[:, camera, slot]
        return apply_slot(images, *draws, seeds, self.used, self.reach, look=images.device.type == "cpu")

    def _fused(self, images: Tensor, sampled: SampledOps, camera: int, slot: int) -> Tensor:
        """The same in one or two passes over the images. Only the GPU reads the operations."""
        ops, (kinds, numbers, seeds) = torch.ops.flexor, sampled
        if images.dtype != torch.uint8:
            images = images.float()
        sums = rows = None
        if ImageOp.CONTRAST in self.used:
            sums = ops.augment_gray_sums(images, kinds, camera, slot)
        if ImageOp.BLUR in self.used:
            rows = ops.augment_blur_rows(images, kinds, numbers, camera, slot, self.reach)
        return ops.augment_slot(images, kinds, numbers, seeds, sums, rows, camera, slot, self.reach)


def _check_sizes(transforms: list[Transform], cameras: Mapping[str, PolicyFeature]) -> None:
    """Refuse what does not work with images of these sizes."""
    for name, (channels, *size) in ((name, feature.shape) for name, feature in cameras.items()):
        if channels not in CHANNELS:
            raise ConfigError(
                f"dataset.image_transforms: {name} has {channels} channels, but only images with 1 or 3 can be "
                "augmented. Train without it, or with --dataset.image_transforms.enable=false."
            )
        for each in transforms:
            for operation in each.operations:
                where = f"{WHERE}.{each.name}.kwargs"
                if operation.size is not None and list(operation.size) != size:
                    raise ConfigError(
                        f"{where}.size={list(operation.size)}, but images of {name} are {size}. A policy needs images "
                        "of one size: leave `size` out, and each camera keeps its own."
                    )
                if operation.op is ImageOp.BLUR and max(operation.kernel) // 2 >= min(size):
                    raise ConfigError(
                        f"{where}.kernel_size={list(operation.kernel)} is too large for images of {name}, "
                        f"which are {size}."
                    )


def augmentation(
    settings: ImageTransformsConfig, cameras: Mapping[str, PolicyFeature], skip: Collection[str] = ()
) -> AugmentImages | None:
    """The step for these cameras; None if there is nothing to do. `skip`: cameras of depth, which stay as they are."""
    selected = {name: feature for name, feature in cameras.items() if name not in skip}
    if not settings.enable or not selected or not read_transforms(settings):
        return None
    return AugmentImages(settings, selected)


def augmented(pipeline: Pipeline, step: ProcessingStep | None) -> Pipeline:
    """The processing before the policy as in training: images are augmented before they are normalised."""
    if step is None:
        return pipeline
    steps = pipeline.steps
    place = next((n for n, each in enumerate(steps) if each.takes_bytes), None)
    if place is None:
        moves = [n + 1 for n, each in enumerate(steps) if isinstance(each, ToDevice)]
        place = moves[0] if moves else None
    if place is None:
        raise ConfigError(
            "dataset.image_transforms.enable=true: this policy's processing has neither the step Normalize nor "
            "ToDevice, before or after which images are augmented."
        )
    return replace(pipeline, steps=[*steps[:place], step, *steps[place:]])
