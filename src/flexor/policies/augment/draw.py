"""Samples which transforms each image gets, in which order, with which parameters. No value is read on the host.

All random numbers of a batch come from one draw of keyed noise, so a sample's augmentation depends on the seed, the
step and the sample alone. Each camera is sampled independently. All frames of a sample's window share its operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flexor.core.rng import NoiseSource
from flexor.policies.augment.arguments import Range
from flexor.policies.augment.operations import NUMBERS, RANDOM_PIXELS, ImageOp, Operation, Transform

ATTEMPTS = 10  # to draw a rectangle that fits into the image, as torchvision does
RECTANGLE = 2 * ATTEMPTS + 3  # random numbers of a rectangle
NAME = "augmentation"  # of the noise


class SampledOps(NamedTuple):
    """Operations of B samples, C cameras and S slots, which are applied one after the other."""

    ops: Tensor  # [B, C, S] int32
    numbers: Tensor  # [B, C, S, NUMBERS]
    seeds: Tensor | None  # [B, C, S] int64, for operations with a random number per pixel


@dataclass(frozen=True)
class _Tables:
    """What all samples share, on one device."""

    ops: Tensor  # [E, M]: of the transforms, each filled up to M operations
    log_weights: Tensor  # [E]
    low: Tensor  # [C, E, M, NUMBERS]
    span: Tensor
    integer: Tensor  # bool [E, M, NUMBERS]: numbers to round
    sizes: Tensor  # [C, 2]
    fallbacks: list[Tensor]  # of each rectangle [C, 2]: its size if no sampled one fits


class TransformSampler:
    """Draws operations for cameras of these sizes (height, width). `depth`: operations per transform."""

    def __init__(
        self,
        transforms: Sequence[Transform],
        count: int,
        random_order: bool,
        sizes: Sequence[tuple[int, int]],
    ):
        self.transforms, self.sizes, self.random_order = list(transforms), list(sizes), random_order
        self.count = min(count, len(self.transforms))
        self.depth = max(1, *(len(each.operations) for each in self.transforms))
        self.slots = self.count * self.depth
        self.rectangles = [
            (entry, place, operation)
            for entry, transform in enumerate(self.transforms)
            for place, operation in enumerate(transform.operations)
            if operation.rectangle is not None
        ]
        used = {operation.op for each in self.transforms for operation in each.operations}
        self.random_pixels = bool(used & {*RANDOM_PIXELS})
        self._tables: dict[torch.device, _Tables] = {}

    def __call__(self, noise: NoiseSource, samples: int, device: torch.device) -> SampledOps:
        tables = self.tables(device)
        entries, depth, cameras = (len(self.transforms), self.depth, len(self.sizes))
        parts = {
            "numbers": entries * depth * NUMBERS,
            "choice": entries,
            "order": entries * depth if depth > 1 else 0,
            "rectangles": len(self.rectangles) * RECTANGLE,
            "seeds": 2 * self.slots if self.random_pixels else 0,
        }
        random = noise.uniform(NAME, (samples, cameras, sum(parts.values())))
        uniform = dict(zip(parts, random.split([*parts.values()], dim=-1)))
        numbers = (
            uniform["numbers"].reshape(samples, cameras, entries, depth, NUMBERS) * tables.span + tables.low
        )
        numbers = torch.where(tables.integer, numbers.round(), numbers)
        for index, (entry, place, operation) in enumerate(self.rectangles):
            part = uniform["rectangles"][..., index * RECTANGLE : (index + 1) * RECTANGLE]
            rectangle = draw_rectangle(operation, part, tables.sizes, tables.fallbacks[index])
            numbers[:, :, entry, place, :4] = rectangle
        choice = self._choose(uniform["choice"], tables)
        ops, numbers = self._gather(choice, numbers, uniform["order"], tables)
        seeds = _seeds(uniform["seeds"]) if self.random_pixels else None
        return SampledOps(ops, numbers, seeds)

    def _choose(self, uniform: Tensor, tables: _Tables) -> Tensor:
        """Different transforms [B, C, count], sampled by weight without replacement (Gumbel top-k)."""
        scores = tables.log_weights - (-uniform.log()).log()
        choice = scores.topk(self.count, dim=-1).indices
        return choice if self.random_order else choice.sort(dim=-1).values

    def _gather(
        self, choice: Tensor, numbers: Tensor, order: Tensor, tables: _Tables
    ) -> tuple[Tensor, Tensor]:
        """The operations of these transforms, in the order in which they are applied."""
        samples, cameras, _ = choice.shape
        ops = tables.ops[choice]  # [B, C, count, M]
        index = choice[..., None, None].expand(-1, -1, -1, self.depth, NUMBERS)
        numbers = numbers.gather(2, index)
        if self.depth > 1:
            keys = order.reshape(samples, cameras, -1, self.depth).gather(2, index[..., 0])
            order = keys.argsort(dim=-1)
            ops = ops.gather(3, order)
            numbers = numbers.gather(3, order[..., None].expand_as(numbers))
        return ops.flatten(2).contiguous(), numbers.flatten(2, 3).contiguous()

    def tables(self, device: torch.device) -> _Tables:
        """Built once per device: a CUDA graph can't copy them from the host."""
        if device not in self._tables:
            self._tables[device] = self._build_tables(device)
        return self._tables[device]

    def _build_tables(self, device: torch.device) -> _Tables:
        entries, depth, cameras = (len(self.transforms), self.depth, len(self.sizes))
        ops = torch.zeros(entries, depth, dtype=torch.int32)
        low, high = torch.zeros(2, cameras, entries, depth, NUMBERS, dtype=torch.float64)
        integer = torch.zeros(entries, depth, NUMBERS, dtype=torch.bool)
        for entry, transform in enumerate(self.transforms):
            for place, operation in enumerate(transform.operations):
                ops[entry, place] = operation.op
                integer[entry, place, 1:3] = operation.op in (ImageOp.AFFINE_NEAREST, ImageOp.AFFINE_BILINEAR)
                for camera, size in enumerate(self.sizes):
                    for column, (least, greatest) in _ranges(operation, size).items():
                        low[camera, entry, place, column] = least
                        high[camera, entry, place, column] = greatest
        weights = torch.tensor([each.weight for each in self.transforms], dtype=torch.float64)
        return _Tables(
            ops.to(device),
            weights.log().float().to(device),
            low.float().to(device),
            (high - low).float().to(device),
            integer.to(device),
            torch.tensor(self.sizes, dtype=torch.float32).to(device),
            [fallback_size(operation, self.sizes).to(device) for _, _, operation in self.rectangles],
        )


def _ranges(operation: Operation, size: tuple[int, int]) -> dict[int, Range]:
    """Its ranges for images of this size."""
    height, width = size
    across, down = operation.shift[0] * width, operation.shift[1] * height
    ranges = {**operation.ranges}
    if operation.op in (ImageOp.AFFINE_NEAREST, ImageOp.AFFINE_BILINEAR):
        ranges |= {1: (-across, across), 2: (-down, down)}
    if operation.centre is not None:
        x, y = operation.centre[0] - width / 2, operation.centre[1] - height / 2
        ranges |= {6: (x, x), 7: (y, y)}
    return ranges


def draw_rectangle(operation: Operation, uniform: Tensor, size: Tensor, fallback: Tensor) -> Tensor:
    """Top, left, height and width [B, C, 4], from uniform numbers [B, C, RECTANGLE] and the sizes of the images [C, 2].

    The first of ten rectangles that fits. If none does, one of size `fallback` [C, 2] in the centre.
    """
    rectangle, is_crop = operation.rectangle, operation.op is ImageOp.CROP
    assert rectangle is not None
    areas, ratios, place = uniform.split([ATTEMPTS, ATTEMPTS, 3], dim=-1)
    down, across, chance = place.unbind(-1)
    low, high = (math.log(each) for each in rectangle.ratio)
    area = _within(areas, rectangle.area) * size.prod(-1)[:, None]
    ratio = _within(ratios, (low, high)).exp()
    first, second = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    # a crop's ratio is width / height, as torchvision's
    tall, wide = (second, first) if is_crop else (first, second)
    height, width = size[:, :1], size[:, 1:]
    within = (tall > 0) & (tall <= height) & (wide > 0) & (wide <= width)
    fits = within if is_crop else (tall < height) & (wide < width)
    first_fit, any_fits = fits.int().argmax(-1, keepdim=True), fits.any(-1)
    tall = torch.where(any_fits, tall.gather(-1, first_fit)[..., 0], fallback[:, 0])
    wide = torch.where(any_fits, wide.gather(-1, first_fit)[..., 0], fallback[:, 1])
    free_down, free_across = size[:, 0] - tall, size[:, 1] - wide
    top = torch.where(any_fits, (down * (free_down + 1)).floor(), (free_down / 2).floor())
    left = torch.where(any_fits, (across * (free_across + 1)).floor(), (free_across / 2).floor())
    is_applied = chance <= rectangle.probability
    # minimum: a uniform number can round to 1
    return torch.stack(
        [top.minimum(free_down), left.minimum(free_across), tall * is_applied, wide * is_applied], dim=-1
    )


def fallback_size(operation: Operation, sizes: Sequence[tuple[int, int]]) -> Tensor:
    """For images of these sizes: the largest crop whose ratio is allowed; nothing is erased."""
    assert operation.rectangle is not None
    if operation.op is not ImageOp.CROP:
        return torch.zeros(len(sizes), 2)
    return torch.tensor([_largest(operation.rectangle.ratio, size) for size in sizes])


def _within(uniform: Tensor, span: Range) -> Tensor:
    return uniform * (span[1] - span[0]) + span[0]


def _largest(ratio: Range, size: tuple[int, int]) -> tuple[float, float]:
    """Height and width of the largest part of an image whose width / height is in this range."""
    height, width = size
    if width / height < ratio[0]:
        return float(round(width / ratio[0])), float(width)
    if width / height > ratio[1]:
        return float(height), float(round(height * ratio[1]))
    return float(height), float(width)


def _seeds(uniform: Tensor) -> Tensor:
    """48 random bits for each slot, of two numbers with 24 each."""
    bits = (uniform * (1 << 24)).long()
    high, low = bits.chunk(2, dim=-1)
    return ((high << 24) | low).contiguous()
