"""The Triton kernels of the operators in `kernels/augment.py`."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexor.kernels.augment import SUM_BLOCK, parts_of

# Pixels and warps of a program: two pixels per thread, because some operations need many registers per pixel.
PIXELS, WARPS = 512, 8

# the operations, as in `policies/augment/operations.py`
BRIGHTNESS, CONTRAST, SATURATION, HUE = (tl.constexpr(n) for n in (1, 2, 3, 4))
SHARPNESS, AFFINE_NEAREST, AFFINE_BILINEAR, CROP = (tl.constexpr(n) for n in (5, 6, 7, 8))
BLUR, NOISE, ERASE, ERASE_NOISE = (tl.constexpr(n) for n in (9, 10, 11, 12))
FILL = tl.constexpr(9)
RED, GREEN, BLUE = tl.constexpr(0.2989), tl.constexpr(0.587), tl.constexpr(0.114)
# SplitMix64, as in core/rng.py, in signed integers
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
MIX_1, MIX_2 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64)), tl.constexpr(0x94D049BB133111EB - (1 << 64))
TAU = tl.constexpr(6.283185307179586)


@triton.jit
def _read(image, offset, mask):
    """Values in [0, 1]."""
    value = tl.load(image + offset, mask=mask, other=0)
    if value.dtype == tl.uint8:
        value = tl.div_rn(value.to(tl.float32), 255.0)
    return value


@triton.jit
def _gray(red, green, blue, CHANNELS: tl.constexpr):
    gray = red
    if CHANNELS == 3:
        gray = red * RED + green * GREEN + blue * BLUE
    return gray


@triton.jit
def _clamp(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _blend(x, other, factor):
    return _clamp(x * factor + other * (1 - factor))


@triton.jit
def _blend_all(red, green, blue, other, factor):
    return _blend(red, other, factor), _blend(green, other, factor), _blend(blue, other, factor)


@triton.jit
def _modulo_6(x):
    return x - 6 * tl.floor(x / 6)


@triton.jit
def _channel(sixths, start, largest, chroma):
    sector = _modulo_6(sixths + start)
    return largest - chroma * _clamp(tl.minimum(sector, 4 - sector))


@triton.jit
def _sharpen(image, y, x, height, width, factor, inside):
    """One channel."""
    center = _read(image, y * width + x, inside)
    inner = inside & (x > 0) & (y > 0) & (x < width - 1) & (y < height - 1)
    total = 4 * center
    for dy in tl.static_range(-1, 2):
        for dx in tl.static_range(-1, 2):
            total += _read(image, (y + dy) * width + x + dx, inner)
    return _clamp(tl.where(inner, center + (total / 13 - center) * (1 - factor), center))


@triton.jit
def _tan(x):
    return tl.sin(x) / tl.cos(x)


@triton.jit
def _source(numbers, y, x, height, width):
    """The coordinates that a pixel is sampled from: see `affine_matrix` in policies/augment/plain.py."""
    angle, right, down = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    scale, shear_x, shear_y = tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5)
    centre_x, centre_y = tl.load(numbers + 6), tl.load(numbers + 7)
    cosine, sine = tl.cos(angle - shear_y) / tl.cos(shear_y), tl.sin(angle - shear_y) / tl.cos(shear_y)
    a, b = cosine / scale, (cosine * _tan(shear_x) + tl.sin(angle)) / scale
    c, d = sine / scale, (tl.cos(angle) - sine * _tan(shear_x)) / scale
    across, below = (width - 1) / 2.0, (height - 1) / 2.0
    from_x, from_y = x - across, y - below
    right, down = right + centre_x, down + centre_y
    source_x = d * from_x + b * from_y + (centre_x - d * right - b * down) + across
    source_y = -c * from_x + a * from_y + (centre_y + c * right - a * down) + below
    return source_y, source_x


@triton.jit
def _round_half_to_even(x):
    up = tl.floor(x + 0.5)
    odd = up - 2 * tl.floor(up / 2)
    return up - tl.where((up - x == 0.5) & (odd == 1), 1.0, 0.0)


@triton.jit
def _read_padded(image, y, x, height, width, inside):
    """A pixel's value, or 0 outside the image."""
    in_bounds = inside & (x >= 0) & (y >= 0) & (x < width) & (y < height)
    return _read(image, y.to(tl.int32) * width + x.to(tl.int32), in_bounds)


@triton.jit
def _nearest(image, y, x, height, width, fill, inside):
    y, x = _round_half_to_even(y), _round_half_to_even(x)
    in_bounds = (x >= 0) & (y >= 0) & (x < width) & (y < height)
    return tl.where(in_bounds, _read_padded(image, y, x, height, width, inside), fill)


@triton.jit
def _bilinear_weight(y, x, dy, dx, height, width):
    """The weight of a neighbour in bilinear interpolation; 0 outside the image."""
    top, left = tl.floor(y) + dy, tl.floor(x) + dx
    in_bounds = (left >= 0) & (top >= 0) & (left < width) & (top < height)
    return tl.where(in_bounds, (1 - tl.abs(y - top)) * (1 - tl.abs(x - left)), 0.0)


@triton.jit
def _bilinear(image, y, x, height, width, fill, inside):
    value, covered = tl.zeros_like(x), tl.zeros_like(x)
    for dy in tl.static_range(2):
        for dx in tl.static_range(2):
            weight = _bilinear_weight(y, x, dy, dx, height, width)
            value += weight * _read_padded(image, tl.floor(y) + dy, tl.floor(x) + dx, height, width, inside)
            covered += weight
    return (value - fill) * covered + fill


@triton.jit
def _taps(index, start, length, size):
    """Two neighbouring rows or columns of a crop, and the weight of the second."""
    position = tl.maximum((index + 0.5) * (length / size) - 0.5, 0.0)
    first = tl.floor(position)
    return start + first, start + tl.minimum(first + 1, length - 1), position - first


@triton.jit
def _resized(image, numbers, y, x, height, width, inside):
    top, left, tall, wide = (
        tl.load(numbers),
        tl.load(numbers + 1),
        tl.load(numbers + 2),
        tl.load(numbers + 3),
    )
    y0, y1, down = _taps(y, top, tall, height)
    x0, x1, across = _taps(x, left, wide, width)
    upper = _read_padded(image, y0, x0, height, width, inside) * (1 - across)
    upper += _read_padded(image, y0, x1, height, width, inside) * across
    lower = _read_padded(image, y1, x0, height, width, inside) * (1 - across)
    lower += _read_padded(image, y1, x1, height, width, inside) * across
    return upper * (1 - down) + lower * down


@triton.jit
def _blurred(image, position, size, start, stride, sigma, kernel, inside, REACH: tl.constexpr):
    """Blur along rows or columns of `size` pixels: `position` along the line, whose offset is `start`."""
    total, weights = tl.zeros(position.shape, tl.float32), sigma * 0
    for tap in range(-REACH, REACH + 1):
        weight = tl.exp((tap / sigma) * (tap / sigma) * -0.5)
        weight = tl.where(tl.abs(tap * 1.0) < kernel / 2, weight, 0.0)
        index = tl.abs(position + tap)
        index = tl.minimum(index, 2 * (size - 1) - index)
        total += weight * _read(image, start + index * stride, inside)
        weights += weight
    return total / weights


@triton.jit
def _normal(seed, counter):
    bits = seed + (counter + 1).to(tl.int64) * GOLDEN
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * MIX_1
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * MIX_2
    bits = bits ^ ((bits >> 31) & 0x1FFFFFFFF)
    first = (((bits >> 40) & 0xFFFFFF).to(tl.float32) + 0.5) * 5.9604644775390625e-08  # 2 ** -24
    second = (((bits >> 16) & 0xFFFFFF).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    return tl.sqrt(-2 * tl.log(first)) * tl.cos(second * TAU)


@triton.jit
def _noisy(value, numbers, seed, counter):
    value = value + tl.load(numbers) + tl.load(numbers + 1) * _normal(seed, counter)
    return tl.where(tl.load(numbers + 2) > 0, _clamp(value), value)


@triton.jit
def _add_noise(red, green, blue, numbers, seed, counter, pixels, CHANNELS: tl.constexpr):
    red = _noisy(red, numbers, seed, counter)
    green = _noisy(green, numbers, seed, counter + (CHANNELS // 2) * pixels)
    return red, green, _noisy(blue, numbers, seed, counter + (CHANNELS - 1) * pixels)


# Slots begin at any address: without specialising on alignment, one compilation serves all.
@triton.jit(do_not_specialize_on_alignment=["ops"])
def _gray_sums(images, ops, out, frames, step, pixels, CHANNELS: tl.constexpr, PIXELS: tl.constexpr):
    """A program handles a block of pixels of one image."""
    frame, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(ops + frame // frames * step) == CONTRAST:
        image = images + frame * CHANNELS * pixels
        pixel = part * PIXELS + tl.arange(0, PIXELS)
        inside = pixel < pixels
        red = _read(image, pixel, inside)
        green = _read(image + (CHANNELS // 2) * pixels, pixel, inside)
        blue = _read(image + (CHANNELS - 1) * pixels, pixel, inside)
        tl.store(out + frame * tl.num_programs(1) + part, tl.sum(_gray(red, green, blue, CHANNELS)))


@triton.jit(do_not_specialize_on_alignment=["ops", "numbers"])
def _blur_rows(
    images, ops, numbers, out, frames, step, height, width, N,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    frame, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = frame // frames * step
    if tl.load(ops + row) == BLUR:
        numbers += row * N
        pixels = height * width
        pixel = part * PIXELS + tl.arange(0, PIXELS)
        inside, x = pixel < pixels, pixel % width
        sigma, kernel = tl.load(numbers), tl.load(numbers + 1)
        for channel in tl.static_range(CHANNELS):
            start = (frame * CHANNELS + channel) * pixels
            value = _blurred(images + start, x, width, pixel - x, 1, sigma, kernel, inside, REACH)
            tl.store(out + start + pixel, value, mask=inside)


@triton.jit
def _shift_hue(red, green, blue, turns):
    largest = tl.maximum(tl.maximum(red, green), blue)
    chroma = largest - tl.minimum(tl.minimum(red, green), blue)
    divisor = tl.where(chroma == 0, 1.0, chroma)
    other = tl.where(largest == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor)
    sixths = _modulo_6(tl.where(largest == red, (green - blue) / divisor, other) + 6 * turns)
    red, green = _channel(sixths, 5, largest, chroma), _channel(sixths, 3, largest, chroma)
    return red, green, _channel(sixths, 1, largest, chroma)


@triton.jit
def _affine(first, second, third, op, numbers, y, x, height, width, inside):
    fill = numbers + FILL
    source_y, source_x = _source(numbers, y, x, height, width)
    if op == AFFINE_NEAREST:
        red = _nearest(first, source_y, source_x, height, width, tl.load(fill), inside)
        green = _nearest(second, source_y, source_x, height, width, tl.load(fill + 1), inside)
        blue = _nearest(third, source_y, source_x, height, width, tl.load(fill + 2), inside)
    else:
        red = _bilinear(first, source_y, source_x, height, width, tl.load(fill), inside)
        green = _bilinear(second, source_y, source_x, height, width, tl.load(fill + 1), inside)
        blue = _bilinear(third, source_y, source_x, height, width, tl.load(fill + 2), inside)
    return red, green, blue


@triton.jit
def _blur_columns(
    rows, sigma, kernel, y, x, height, width, inside, CHANNELS: tl.constexpr, REACH: tl.constexpr
):
    """`rows`: the image, blurred along its rows."""
    stride = (CHANNELS // 2) * height * width
    red = _blurred(rows, y, height, x, width, sigma, kernel, inside, REACH)
    rows += stride
    green = _blurred(rows, y, height, x, width, sigma, kernel, inside, REACH)
    rows += stride
    return red, green, _blurred(rows, y, height, x, width, sigma, kernel, inside, REACH)


@triton.jit
def _erase(red, green, blue, op, numbers, top, seeds, row, y, x, pixel, pixels, CHANNELS: tl.constexpr):
    left, tall, wide = tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
    erased = (y >= top) & (y < top + tall) & (x >= left) & (x < left + wide)
    if op == ERASE:
        red = tl.where(erased, tl.load(numbers + FILL), red)
        green = tl.where(erased, tl.load(numbers + FILL + 1), green)
        blue = tl.where(erased, tl.load(numbers + FILL + 2), blue)
    else:
        if seeds is not None:
            seed = tl.load(seeds + row)
            red = tl.where(erased, _normal(seed, pixel), red)
            green = tl.where(erased, _normal(seed, pixel + (CHANNELS // 2) * pixels), green)
            blue = tl.where(erased, _normal(seed, pixel + (CHANNELS - 1) * pixels), blue)
    return red, green, blue


@triton.jit(do_not_specialize_on_alignment=["ops", "numbers", "seeds"])
def _slot(
    images, ops, numbers, seeds, sums, rows, out, parts, frames, step, height, width, N,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, PARTS: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """A program handles a block of pixels of all channels of one image. A single channel serves as all three."""
    frame, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = frame // frames * step
    op = tl.load(ops + row)
    numbers += row * N
    pixels = height * width
    pixel = part * PIXELS + tl.arange(0, PIXELS)
    inside = pixel < pixels
    y, x = pixel // width, pixel % width
    first = images + frame * CHANNELS * pixels
    second, third = first + (CHANNELS // 2) * pixels, first + (CHANNELS - 1) * pixels
    red, green, blue = _read(first, pixel, inside), _read(second, pixel, inside), _read(third, pixel, inside)
    number = tl.load(numbers)
    if op == BRIGHTNESS:
        red, green, blue = _clamp(red * number), _clamp(green * number), _clamp(blue * number)
    elif op == CONTRAST:
        if sums is not None:
            index = tl.arange(0, PARTS)
            mean = tl.sum(tl.load(sums + frame * parts + index, mask=index < parts, other=0.0)) / pixels
            red, green, blue = _blend_all(red, green, blue, mean, number)
    elif op == SATURATION:
        red, green, blue = _blend_all(red, green, blue, _gray(red, green, blue, CHANNELS), number)
    elif op == HUE:
        if CHANNELS == 3:
            red, green, blue = _shift_hue(red, green, blue, number)
    elif op == SHARPNESS:
        if (height > 2) & (width > 2):
            red = _sharpen(first, y, x, height, width, number, inside)
            green = _sharpen(second, y, x, height, width, number, inside)
            blue = _sharpen(third, y, x, height, width, number, inside)
    elif (op == AFFINE_NEAREST) | (op == AFFINE_BILINEAR):
        red, green, blue = _affine(first, second, third, op, numbers, y, x, height, width, inside)
    elif op == CROP:
        red = _resized(first, numbers, y, x, height, width, inside)
        green = _resized(second, numbers, y, x, height, width, inside)
        blue = _resized(third, numbers, y, x, height, width, inside)
    elif op == BLUR:
        if rows is not None:
            kernel, rows = tl.load(numbers + 2), rows + frame * CHANNELS * pixels
            red, green, blue = _blur_columns(
                rows, number, kernel, y, x, height, width, inside, CHANNELS, REACH
            )
    elif op == NOISE:
        if seeds is not None:
            seed, counter = tl.load(seeds + row), (frame % frames) * CHANNELS * pixels + pixel
            red, green, blue = _add_noise(red, green, blue, numbers, seed, counter, pixels, CHANNELS)
    elif (op == ERASE) | (op == ERASE_NOISE):
        red, green, blue = _erase(
            red, green, blue, op, numbers, number, seeds, row, y, x, pixel, pixels, CHANNELS
        )
    out += frame * CHANNELS * pixels
    tl.store(out + pixel, red, mask=inside)
    if CHANNELS == 3:
        tl.store(out + pixels + pixel, green, mask=inside)
        tl.store(out + 2 * pixels + pixel, blue, mask=inside)


def _sizes(images: Tensor, ops: Tensor, camera: int, slot: int) -> tuple[int, int, int, int, int, int]:
    """Frames per sample, channels, height and width; operations per sample, and the index of this one."""
    assert images.is_contiguous() and ops.is_contiguous() and images.shape[2] in (1, 3)
    _, cameras, slots = ops.shape
    return *images.shape[1:], cameras * slots, camera * slots + slot


def augment_gray_sums(images: Tensor, ops: Tensor, camera: int, slot: int) -> Tensor:
    frames, channels, height, width, step, index = _sizes(images, ops, camera, slot)
    parts = parts_of(images)
    out = images.new_empty(len(images), frames, parts, dtype=torch.float32)
    grid = len(images) * frames, parts
    _gray_sums[grid](images, ops.flatten()[index:], out, frames, step, height * width, channels, SUM_BLOCK)
    return out


def augment_blur_rows(
    images: Tensor, ops: Tensor, numbers: Tensor, camera: int, slot: int, reach: int
) -> Tensor:
    frames, channels, height, width, step, index = _sizes(images, ops, camera, slot)
    out = torch.empty_like(images, dtype=torch.float32)
    draws = ops.flatten()[index:], numbers.flatten(0, -2)[index:]
    grid = len(images) * frames, triton.cdiv(height * width, PIXELS)
    sizes = frames, step, height, width, numbers.shape[-1]
    _blur_rows[grid](images, *draws, out, *sizes, channels, PIXELS, reach, num_warps=WARPS)
    return out


def augment_slot(
    images: Tensor,
    ops: Tensor,
    numbers: Tensor,
    seeds: Tensor | None,
    sums: Tensor | None,
    rows: Tensor | None,
    camera: int,
    slot: int,
    reach: int,
) -> Tensor:
    frames, channels, height, width, step, index = _sizes(images, ops, camera, slot)
    out = torch.empty_like(images, dtype=torch.float32)
    draws = (
        ops.flatten()[index:],
        numbers.flatten(0, -2)[index:],
        None if seeds is None else seeds.flatten()[index:],
    )
    parts = parts_of(images)
    sizes = parts, frames, step, height, width, numbers.shape[-1]
    fixed = channels, PIXELS, triton.next_power_of_2(parts), reach
    grid = len(images) * frames, triton.cdiv(height * width, PIXELS)
    _slot[grid](images, *draws, sums, rows, out, *sizes, *fixed, num_warps=WARPS)
    return out
