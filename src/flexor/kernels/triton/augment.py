"""The Triton kernels of the operators in `kernels/augment.py`."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexor.kernels.augment import SUMMED, parts_of

# Pixels of a program, and its warps: two pixels per thread, because some operations need many registers for each.
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
def _read(image, place, mask):
    """Values from 0 to 1."""
    value = tl.load(image + place, mask=mask, other=0)
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
def _limit(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _blend(x, other, factor):
    return _limit(x * factor + other * (1 - factor))


@triton.jit
def _wrap(x):
    """x modulo 6."""
    return x - 6 * tl.floor(x / 6)


@triton.jit
def _channel(sixths, start, largest, chroma):
    where = _wrap(sixths + start)
    return largest - chroma * _limit(tl.minimum(where, 4 - where))


@triton.jit
def _sharper(image, y, x, height, width, factor, inside):
    """One channel."""
    here = _read(image, y * width + x, inside)
    inner = inside & (x > 0) & (y > 0) & (x < width - 1) & (y < height - 1)
    total = 4 * here
    for dy in tl.static_range(-1, 2):
        for dx in tl.static_range(-1, 2):
            total += _read(image, (y + dy) * width + x + dx, inner)
    return _limit(tl.where(inner, here + (total / 13 - here) * (1 - factor), here))


@triton.jit
def _tan(x):
    return tl.sin(x) / tl.cos(x)


@triton.jit
def _source(numbers, y, x, height, width):
    """Where a pixel comes from: see `affine_matrix` in policies/augment/plain.py."""
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
def _to_even(x):
    """Rounded; halves to the even neighbour."""
    up = tl.floor(x + 0.5)
    odd = up - 2 * tl.floor(up / 2)
    return up - tl.where((up - x == 0.5) & (odd == 1), 1.0, 0.0)


@triton.jit
def _known(image, y, x, height, width, inside):
    """A pixel's value, or 0 outside the image."""
    there = inside & (x >= 0) & (y >= 0) & (x < width) & (y < height)
    return _read(image, y.to(tl.int32) * width + x.to(tl.int32), there)


@triton.jit
def _nearest(image, y, x, height, width, fill, inside):
    y, x = _to_even(y), _to_even(x)
    there = (x >= 0) & (y >= 0) & (x < width) & (y < height)
    return tl.where(there, _known(image, y, x, height, width, inside), fill)


@triton.jit
def _share(y, x, dy, dx, height, width):
    """How much of a neighbour is in a value between pixels, and 0 outside the image."""
    top, left = tl.floor(y) + dy, tl.floor(x) + dx
    there = (left >= 0) & (top >= 0) & (left < width) & (top < height)
    return tl.where(there, (1 - tl.abs(y - top)) * (1 - tl.abs(x - left)), 0.0)


@triton.jit
def _bilinear(image, y, x, height, width, fill, inside):
    value, covered = tl.zeros_like(x), tl.zeros_like(x)
    for dy in tl.static_range(2):
        for dx in tl.static_range(2):
            share = _share(y, x, dy, dx, height, width)
            value += share * _known(image, tl.floor(y) + dy, tl.floor(x) + dx, height, width, inside)
            covered += share
    return (value - fill) * covered + fill


@triton.jit
def _taps(place, start, length, size):
    """Two neighbours of a crop's row or column, and the share of the second."""
    at = tl.maximum((place + 0.5) * (length / size) - 0.5, 0.0)
    first = tl.floor(at)
    return start + first, start + tl.minimum(first + 1, length - 1), at - first


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
    upper = _known(image, y0, x0, height, width, inside) * (1 - across)
    upper += _known(image, y0, x1, height, width, inside) * across
    lower = _known(image, y1, x0, height, width, inside) * (1 - across)
    lower += _known(image, y1, x1, height, width, inside) * across
    return upper * (1 - down) + lower * down


@triton.jit
def _blurred(image, place, size, before, stride, sigma, kernel, inside, REACH: tl.constexpr):
    """Along rows or columns: `place` on a line of `size` pixels, `stride` apart, which starts at `before`."""
    total, weights = tl.zeros(place.shape, tl.float32), sigma * 0
    for tap in range(-REACH, REACH + 1):
        weight = tl.exp((tap / sigma) * (tap / sigma) * -0.5)
        weight = tl.where(tl.abs(tap * 1.0) < kernel / 2, weight, 0.0)
        index = tl.abs(place + tap)
        index = tl.minimum(index, 2 * (size - 1) - index)
        total += weight * _read(image, before + index * stride, inside)
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
    return tl.where(tl.load(numbers + 2) > 0, _limit(value), value)


# Not compiled again for each slot, whose operations begin at any address.
@triton.jit(do_not_specialize_on_alignment=["ops"])
def _gray_sums(images, ops, out, frames, step, pixels, CHANNELS: tl.constexpr, PIXELS: tl.constexpr):
    """A program has some pixels of one image."""
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
    images,
    ops,
    numbers,
    out,
    frames,
    step,
    height,
    width,
    N,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    REACH: tl.constexpr,
):
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


@triton.jit(do_not_specialize_on_alignment=["ops", "numbers", "seeds"])
def _slot(
    images,
    ops,
    numbers,
    seeds,
    sums,
    rows,
    out,
    parts,
    frames,
    step,
    height,
    width,
    N,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    PARTS: tl.constexpr,
    REACH: tl.constexpr,
):
    """A program has some pixels of all channels of one image. With one channel, it stands for all three."""
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
        red, green, blue = _limit(red * number), _limit(green * number), _limit(blue * number)
    elif op == CONTRAST:
        if sums is not None:
            place = tl.arange(0, PARTS)
            found = tl.load(sums + frame * parts + place, mask=place < parts, other=0.0)
            mean = tl.sum(found) / pixels
            red, green, blue = (
                _blend(red, mean, number),
                _blend(green, mean, number),
                _blend(blue, mean, number),
            )
    elif op == SATURATION:
        gray = _gray(red, green, blue, CHANNELS)
        red, green, blue = _blend(red, gray, number), _blend(green, gray, number), _blend(blue, gray, number)
    elif op == HUE:
        if CHANNELS == 3:
            largest = tl.maximum(tl.maximum(red, green), blue)
            chroma = largest - tl.minimum(tl.minimum(red, green), blue)
            wheel = tl.where(chroma == 0, 1.0, chroma)
            other = tl.where(largest == green, 2 + (blue - red) / wheel, 4 + (red - green) / wheel)
            sixths = _wrap(tl.where(largest == red, (green - blue) / wheel, other) + 6 * number)
            red, green = _channel(sixths, 5, largest, chroma), _channel(sixths, 3, largest, chroma)
            blue = _channel(sixths, 1, largest, chroma)
    elif op == SHARPNESS:
        if (height > 2) & (width > 2):
            red = _sharper(first, y, x, height, width, number, inside)
            green = _sharper(second, y, x, height, width, number, inside)
            blue = _sharper(third, y, x, height, width, number, inside)
    elif (op == AFFINE_NEAREST) | (op == AFFINE_BILINEAR):
        fill = numbers + FILL
        from_y, from_x = _source(numbers, y, x, height, width)
        if op == AFFINE_NEAREST:
            red = _nearest(first, from_y, from_x, height, width, tl.load(fill), inside)
            green = _nearest(second, from_y, from_x, height, width, tl.load(fill + 1), inside)
            blue = _nearest(third, from_y, from_x, height, width, tl.load(fill + 2), inside)
        else:
            red = _bilinear(first, from_y, from_x, height, width, tl.load(fill), inside)
            green = _bilinear(second, from_y, from_x, height, width, tl.load(fill + 1), inside)
            blue = _bilinear(third, from_y, from_x, height, width, tl.load(fill + 2), inside)
    elif op == CROP:
        red = _resized(first, numbers, y, x, height, width, inside)
        green = _resized(second, numbers, y, x, height, width, inside)
        blue = _resized(third, numbers, y, x, height, width, inside)
    elif op == BLUR:
        if rows is not None:
            kernel, start = tl.load(numbers + 2), rows + frame * CHANNELS * pixels
            red = _blurred(start, y, height, x, width, number, kernel, inside, REACH)
            start += (CHANNELS // 2) * pixels
            green = _blurred(start, y, height, x, width, number, kernel, inside, REACH)
            start += (CHANNELS // 2) * pixels
            blue = _blurred(start, y, height, x, width, number, kernel, inside, REACH)
    elif op == NOISE:
        if seeds is not None:
            seed = tl.load(seeds + row)
            counter = (frame % frames) * CHANNELS * pixels + pixel
            red = _noisy(red, numbers, seed, counter)
            green = _noisy(green, numbers, seed, counter + (CHANNELS // 2) * pixels)
            blue = _noisy(blue, numbers, seed, counter + (CHANNELS - 1) * pixels)
    elif (op == ERASE) | (op == ERASE_NOISE):
        left, tall, wide = tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
        erased = (y >= number) & (y < number + tall) & (x >= left) & (x < left + wide)
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
    out += frame * CHANNELS * pixels
    tl.store(out + pixel, red, mask=inside)
    if CHANNELS == 3:
        tl.store(out + pixels + pixel, green, mask=inside)
        tl.store(out + 2 * pixels + pixel, blue, mask=inside)


def _sizes(images: Tensor, ops: Tensor, camera: int, slot: int) -> tuple[int, int, int, int, int, int]:
    """Frames per sample, channels, height and width; operations per sample, and the place of this one among them."""
    assert images.is_contiguous() and ops.is_contiguous() and images.shape[2] in (1, 3)
    _, cameras, slots = ops.shape
    return *images.shape[1:], cameras * slots, camera * slots + slot


def augment_gray_sums(images: Tensor, ops: Tensor, camera: int, slot: int) -> Tensor:
    frames, channels, height, width, step, place = _sizes(images, ops, camera, slot)
    parts = parts_of(images)
    out = images.new_empty(len(images), frames, parts, dtype=torch.float32)
    grid = len(images) * frames, parts
    _gray_sums[grid](images, ops.flatten()[place:], out, frames, step, height * width, channels, SUMMED)
    return out


def augment_blur_rows(
    images: Tensor, ops: Tensor, numbers: Tensor, camera: int, slot: int, reach: int
) -> Tensor:
    frames, channels, height, width, step, place = _sizes(images, ops, camera, slot)
    out = torch.empty_like(images, dtype=torch.float32)
    own = ops.flatten()[place:], numbers.flatten(0, -2)[place:]
    grid = len(images) * frames, triton.cdiv(height * width, PIXELS)
    sizes = frames, step, height, width, numbers.shape[-1]
    _blur_rows[grid](images, *own, out, *sizes, channels, PIXELS, reach, num_warps=WARPS)
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
    frames, channels, height, width, step, place = _sizes(images, ops, camera, slot)
    out = torch.empty_like(images, dtype=torch.float32)
    own = (
        ops.flatten()[place:],
        numbers.flatten(0, -2)[place:],
        None if seeds is None else seeds.flatten()[place:],
    )
    parts = parts_of(images)
    sizes = parts, frames, step, height, width, numbers.shape[-1]
    fixed = channels, PIXELS, triton.next_power_of_2(parts), reach
    grid = len(images) * frames, triton.cdiv(height * width, PIXELS)
    _slot[grid](images, *own, sums, rows, out, *sizes, *fixed, num_warps=WARPS)
    return out
