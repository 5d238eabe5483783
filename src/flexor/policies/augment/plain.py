"""The operations in torch, for any device. `kernels/augment.py` does the same on NVIDIA GPUs.

Images are float [B, T, C, H, W] in [0, 1], with one or three channels. Formulas are torchvision's. Every image is
computed by itself, so the result does not depend on the others in the batch.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from flexor.core.rng import random_bits
from flexor.policies.augment.operations import FILL, ImageOp

GRAY = (0.2989, 0.587, 0.114)


def apply_slot(
    images: Tensor,
    ops: Tensor,
    numbers: Tensor,
    seeds: Tensor | None,
    used: Collection[ImageOp],
    reach: int,
    look: bool,
) -> Tensor:
    """One operation for each sample: ops [B], numbers [B, NUMBERS], seeds [B].

    `used`: the operations that occur in a run; `reach`: radius of its largest blur in pixels; `look`: compute each
    operation only for the samples that have it, which the host must read: on a GPU that would synchronise.
    """
    out = images
    for op in sorted({*used} - {ImageOp.IDENTITY}):
        selected = ops == op
        if not look:
            out = torch.where(selected.view(-1, 1, 1, 1, 1), apply(op, images, numbers, seeds, reach), out)
        elif len(rows := selected.nonzero()[:, 0]):
            row_seeds = None if seeds is None else seeds[rows]
            out = out.index_copy(0, rows, apply(op, images[rows], numbers[rows], row_seeds, reach))
    return out


def apply(op: ImageOp, images: Tensor, numbers: Tensor, seeds: Tensor | None, reach: int) -> Tensor:
    if op in COLOURS:
        return COLOURS[op](images, _column(numbers, 0))
    if op is ImageOp.CROP:
        return crop_and_resize(images, numbers)
    if op is ImageOp.BLUR:
        return blur(images, numbers, reach)
    if op is ImageOp.ERASE:
        return torch.where(_inside(images, numbers), _fill(images, numbers), images)
    if op in (ImageOp.AFFINE_NEAREST, ImageOp.AFFINE_BILINEAR):
        return affine(images, numbers, "nearest" if op is ImageOp.AFFINE_NEAREST else "bilinear")
    assert seeds is not None
    if op is ImageOp.NOISE:
        return add_noise(images, numbers, normal(seeds, images))
    same = normal(seeds, images[:, 0]).unsqueeze(1)  # in all frames
    return torch.where(_inside(images, numbers), same, images)


def _column(numbers: Tensor, column: int) -> Tensor:
    return numbers[:, column].view(-1, 1, 1, 1, 1)


def _fill(images: Tensor, numbers: Tensor) -> Tensor:
    return numbers[:, FILL : FILL + images.shape[2]].view(len(images), 1, -1, 1, 1)


def gray(images: Tensor) -> Tensor:
    """[..., C, H, W] -> [..., 1, H, W]."""
    if images.shape[-3] == 1:
        return images
    red, green, blue = images.split(1, dim=-3)
    return GRAY[0] * red + GRAY[1] * green + GRAY[2] * blue


def _blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return (images * factor + other * (1 - factor)).clamp(0, 1)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    return (images * factor).clamp(0, 1)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Around the mean gray of each frame. It is computed row by row: torch sums a single image in another order."""
    mean = gray(images).mean(-1, keepdim=True).mean(-2, keepdim=True)
    return _blend(images, mean, factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, gray(images), factor)


def hue(images: Tensor, turns: Tensor) -> Tensor:
    """The colour wheel turned, with the same largest and smallest channel."""
    if images.shape[-3] == 1:
        return images
    red, green, blue = images.split(1, dim=-3)
    least, largest = torch.aminmax(images, dim=-3, keepdim=True)
    chroma = largest - least
    divisor = torch.where(chroma == 0, 1.0, chroma)
    sixths = torch.where(
        largest == red,
        (green - blue) / divisor,
        torch.where(largest == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    sixths = torch.remainder(sixths + 6 * turns, 6)
    sectors = torch.cat([torch.remainder(sixths + start, 6) for start in (5, 3, 1)], dim=-3)
    return largest - chroma * torch.minimum(sectors, 4 - sectors).clamp(0, 1)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Away from a smoothed image; the border pixels stay unchanged."""
    height, width = images.shape[-2:]
    if min(height, width) <= 2:
        return images
    inner = images[..., 1:-1, 1:-1]
    shifts = [(y, x) for y in range(3) for x in range(3)]  # of the neighbours and the pixel itself
    total = sum(images[..., y : height - 2 + y, x : width - 2 + x] for y, x in shifts)
    smooth = (total + 4 * inner) / 13
    out = images.clone()
    out[..., 1:-1, 1:-1] = inner + (smooth - inner) * (1 - factor)
    return out.clamp(0, 1)


COLOURS = {
    ImageOp.BRIGHTNESS: brightness,
    ImageOp.CONTRAST: contrast,
    ImageOp.SATURATION: saturation,
    ImageOp.HUE: hue,
    ImageOp.SHARPNESS: sharpness,
}


def affine_matrix(numbers: Tensor) -> Tensor:
    """[B, 2, 3]: from a pixel of the result to where it comes from, both measured from the centre of the image."""
    angle, right, down, scale, shear_x, shear_y, x, y = numbers[:, :8].unbind(-1)
    cosine, sine = (angle - shear_y).cos() / shear_y.cos(), (angle - shear_y).sin() / shear_y.cos()
    a, b = cosine / scale, (cosine * shear_x.tan() + angle.sin()) / scale
    c, d = sine / scale, (angle.cos() - sine * shear_x.tan()) / scale
    rows = (d, b, x - d * (x + right) - b * (y + down)), (-c, a, y + c * (x + right) - a * (y + down))
    return torch.stack([torch.stack(row, -1) for row in rows], dim=1)


def affine(images: Tensor, numbers: Tensor, mode: str) -> Tensor:
    """Rotated, shifted, scaled and sheared; what comes from outside has the fill value."""
    samples, frames, channels, height, width = images.shape
    across = torch.arange(width, device=images.device, dtype=images.dtype) - (width - 1) / 2
    down = torch.arange(height, device=images.device, dtype=images.dtype)[:, None] - (height - 1) / 2
    x, y = (
        row[:, :1, None] * across + row[:, 1:2, None] * down + row[:, 2:, None]
        for row in affine_matrix(numbers).unbind(1)
    )
    grid = torch.stack([x / (width / 2), y / (height / 2)], dim=-1)  # [B, H, W, 2] from -1 to 1
    flat = torch.cat([images, torch.ones_like(images[:, :, :1])], dim=2).flatten(1, 2)
    sampled = F.grid_sample(flat, grid, mode=mode, padding_mode="zeros", align_corners=False)
    pixels, inside = sampled.view(samples, frames, -1, height, width).split([channels, 1], dim=2)
    fill = _fill(images, numbers)
    if mode == "nearest":
        return torch.where(inside < 0.5, fill, pixels)
    return (pixels - fill) * inside + fill


def crop_and_resize(images: Tensor, numbers: Tensor) -> Tensor:
    """A part of each image, resized to the whole image, bilinear."""
    for dim in (-2, -1):
        size = images.shape[dim]
        start, length = numbers[:, dim + 2, None], numbers[:, dim + 4, None]
        position = (torch.arange(size, device=images.device) + 0.5) * (length / size) - 0.5
        position = position.clamp(min=0)  # [B, size]
        first = position.floor()
        second = torch.minimum(first + 1, length - 1)
        shape = [len(images), 1, 1, size, 1] if dim == -2 else [len(images), 1, 1, 1, size]
        weight = (position - first).view(shape)
        # within limits, because samples with another operation have other numbers here
        indices = [(start + index).clamp(0, size - 1).long().view(shape) for index in (first, second)]
        lower, upper = (images.gather(dim, row_or_column.expand_as(images)) for row_or_column in indices)
        images = lower * (1 - weight) + upper * weight
    return images


def blur(images: Tensor, numbers: Tensor, reach: int) -> Tensor:
    """Gaussian; beyond its edge, an image is reflected."""
    for dim, column in ((-1, 1), (-2, 2)):
        size, sigma, kernel = images.shape[dim], numbers[:, :1], numbers[:, column, None]
        taps = torch.arange(-reach, reach + 1, device=images.device)
        weights = (-0.5 * (taps / sigma).square()).exp() * (taps.abs() <= kernel // 2)
        weights = weights / weights.sum(-1, keepdim=True)  # [B, taps]
        out = torch.zeros_like(images)
        position = torch.arange(size, device=images.device)
        for number, tap in enumerate(range(-reach, reach + 1)):
            index = (position + tap).abs()
            index = torch.minimum(index, 2 * (size - 1) - index).clamp(0, size - 1)
            out = out + images.index_select(images.dim() + dim, index) * _column(weights, number)
        images = out
    return images


def add_noise(images: Tensor, numbers: Tensor, noise: Tensor) -> Tensor:
    """`noise`: standard normal, in the shape of the images."""
    noisy = images + _column(numbers, 0) + _column(numbers, 1) * noise
    return torch.where(_column(numbers, 2) > 0, noisy.clamp(0, 1), noisy)


def normal(seeds: Tensor, like: Tensor) -> Tensor:
    """Standard normal noise in the shape of `like`, from a seed for each sample."""
    bits = random_bits(seeds, like[0].numel())
    first, second = (
        (((bits >> shift) & ((1 << 24) - 1)).to(like.dtype) + 0.5) * 2.0**-24 for shift in (40, 16)
    )
    return ((-2 * first.log()).sqrt() * (2 * torch.pi * second).cos()).view(like.shape)


def _inside(images: Tensor, numbers: Tensor) -> Tensor:
    """The pixels in a rectangle [B, 1, 1, H, W]."""
    top, left, tall, wide = (_column(numbers, column) for column in range(4))
    down = torch.arange(images.shape[-2], device=images.device)[:, None]
    across = torch.arange(images.shape[-1], device=images.device)
    return (down >= top) & (down < top + tall) & (across >= left) & (across < left + wide)
