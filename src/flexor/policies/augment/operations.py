"""What augmentation does to an image: operations with their numbers, read from LeRobot's settings.

Each operation has `NUMBERS` numbers per sample. Each number is drawn from a range, which may be a single value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from flexor.core.errors import ConfigError
from flexor.core.typed import closest
from flexor.data.settings import ImageTransformConfig, ImageTransformsConfig, default_transforms
from flexor.policies.augment.arguments import WHERE, Arguments, Range

NUMBERS = 12  # per operation
FILL = 9  # the column of the first of three values for pixels from outside the image, or erased ones


class ImageOp(IntEnum):
    """The operations, and their numbers by column."""

    IDENTITY = 0
    BRIGHTNESS = 1  # factor
    CONTRAST = 2  # factor
    SATURATION = 3  # factor
    HUE = 4  # turns
    SHARPNESS = 5  # factor
    AFFINE_NEAREST = 6  # radians, pixels to the right, pixels down, scale, shear in radians x, y,
    # and the centre x, y from that of the image; FILL
    AFFINE_BILINEAR = 7  # the same
    CROP = 8  # top, left, height, width of what is resized to the whole image
    BLUR = 9  # standard deviation, kernel size in x, in y
    NOISE = 10  # mean, standard deviation, 1 if the result is limited to [0, 1]
    ERASE = 11  # top, left, height, width; FILL
    ERASE_NOISE = 12  # the same, filled with standard normal noise


RANDOM_PIXELS = (ImageOp.NOISE, ImageOp.ERASE_NOISE)


@dataclass(frozen=True)
class Rectangle:
    """How a rectangle is drawn: a part of the image's area, and height / width or its inverse."""

    area: Range
    ratio: Range
    probability: float = 1.0


@dataclass(frozen=True)
class Operation:
    op: ImageOp
    ranges: Mapping[int, Range] = field(default_factory=dict)  # of numbers, by column; others are zero
    shift: Range = (0.0, 0.0)  # AFFINE: the largest shift, as a part of width and height
    centre: Range | None = None  # AFFINE: x and y in pixels; None: the centre of the image
    rectangle: Rectangle | None = None  # CROP, ERASE
    size: tuple[int, int] | None = None  # CROP: the size of the result, if it is given

    @property
    def kernel(self) -> tuple[int, int]:
        """BLUR: kernel size in x and y."""
        return int(self.ranges[1][0]), int(self.ranges[2][0])


@dataclass(frozen=True)
class Transform:
    """An entry of `tfs`: operations that are chosen together and applied in a random order."""

    name: str
    weight: float
    operations: tuple[Operation, ...]


def read_transforms(settings: ImageTransformsConfig) -> list[Transform]:
    """The transforms that can be chosen. Refuses what Flexor does not support or what makes no sense."""
    transforms = []
    for name, entry in settings.tfs.items():
        if not entry.weight >= 0:
            raise ConfigError(f"{WHERE}.{name}.weight={entry.weight} must be at least 0.")
        if entry.weight > 0:
            transforms.append(Transform(name, entry.weight, tuple(_operations(name, entry))))
    return transforms


def check_transform_names(settings: ImageTransformsConfig) -> None:
    """Refuse a misspelt name: with the default transforms beside it, it is not meant as a new one without a type."""
    names = default_transforms()
    for name, entry in settings.tfs.items():
        if (
            names.keys() <= settings.tfs.keys()
            and name not in names
            and entry.type == ImageTransformConfig.type
        ):
            raise ConfigError(
                f"Unknown transform {WHERE}.{name}. {closest(name, names)} A new one needs a type: "
                f"--{WHERE}.{name}.type=ColorJitter"
            )


def describe_transforms(settings: ImageTransformsConfig) -> str:
    """In a few words: "brightness, hue (weight 2), 1 per image"."""
    weights = {name: entry.weight for name, entry in settings.tfs.items() if entry.weight > 0}
    names = [name if weight == 1 else f"{name} (weight {weight:g})" for name, weight in weights.items()]
    return f"{', '.join(names)}; {min(settings.max_num_transforms, len(names))} per image"


def _operations(name: str, entry: ImageTransformConfig) -> list[Operation]:
    if entry.type not in KINDS:
        raise ConfigError(
            f"{WHERE}.{name}.type={entry.type!r} is not supported. {closest(entry.type, KINDS)} To train without it: "
            f"--{WHERE}.{name}.weight=0"
        )
    arguments = Arguments(name, entry.type, entry.kwargs)
    operations = KINDS[entry.type](arguments)
    arguments.done()
    return operations


def _around_one(value: float) -> Range:
    return max(0.0, 1.0 - value), 1.0 + value


def _around_zero(value: float) -> Range:
    return -value, value


def _colour(arguments: Arguments) -> list[Operation]:
    factors = {
        "brightness": ImageOp.BRIGHTNESS,
        "contrast": ImageOp.CONTRAST,
        "saturation": ImageOp.SATURATION,
    }
    spans = {op: arguments.span(name, None, _around_one, 0.0) for name, op in factors.items()}
    hue = arguments.span("hue", None, _around_zero, -0.5, 0.5)
    if hue is not None and hue[1] > 0.5:
        raise arguments.fail("hue", hue[1], "a number from 0 to 0.5")
    spans[ImageOp.HUE] = hue
    return [Operation(op, {0: span}) for op, span in spans.items() if span is not None]


def _sharpness(arguments: Arguments) -> list[Operation]:
    span = arguments.span("sharpness", None, _around_one, 0.0)
    if span is None:
        raise arguments.fail("sharpness", None, "[low, high]")
    return [Operation(ImageOp.SHARPNESS, {0: span})]


def _affine(arguments: Arguments) -> list[Operation]:
    degrees = arguments.span("degrees", None, _around_zero, -math.inf)
    if degrees is None:
        raise arguments.fail("degrees", None, "[low, high]")
    shift = arguments.take("translate")
    if shift is not None and (not isinstance(shift, list | tuple) or len(shift) != 2):
        raise arguments.fail("translate", shift, "[part of the width, part of the height]")
    across, down = (arguments.number("translate", part, 0.0, 1.0) for part in shift or (0, 0))
    scale = arguments.take("scale")
    scale = (1.0, 1.0) if scale is None else arguments.pair("scale", scale, 0.0)
    if scale[0] <= 0:
        raise arguments.fail("scale", list(scale), "numbers above 0")
    shear_x, shear_y = _shear(arguments)
    op = _interpolation(arguments)
    centre = arguments.take("center")
    if centre is not None:
        if not isinstance(centre, list | tuple) or len(centre) != 2:
            raise arguments.fail("center", centre, "[x, y] in pixels")
        centre = arguments.number("center", centre[0]), arguments.number("center", centre[1])
    ranges = {0: _radians(degrees), 3: scale, 4: shear_x, 5: shear_y, **_fill(arguments, "fill")}
    return [Operation(op, ranges, shift=(across, down), centre=centre)]


def _shear(arguments: Arguments) -> tuple[Range, Range]:
    value = arguments.take("shear")
    if isinstance(value, list | tuple) and len(value) == 4:
        x, y = arguments.pair("shear", value[:2]), arguments.pair("shear", value[2:])
        return _radians(x), _radians(y)
    if value is None:
        return (0.0, 0.0), (0.0, 0.0)
    pair = value if isinstance(value, list | tuple) else _around_zero(arguments.number("shear", value, 0.0))
    return _radians(arguments.pair("shear", pair)), (0.0, 0.0)


def _radians(degrees: Range) -> Range:
    return math.radians(degrees[0]), math.radians(degrees[1])


def _interpolation(arguments: Arguments) -> ImageOp:
    modes = ("nearest", "bilinear")
    mode = arguments.choice("interpolation", "nearest", *modes)
    return ImageOp.AFFINE_NEAREST if mode == "nearest" else ImageOp.AFFINE_BILINEAR


def _fill(arguments: Arguments, key: str, default: Any = 0) -> dict[int, Range]:
    """A value for all three channels, or one for each."""
    value = arguments.take(key, default)
    values = list(value) if isinstance(value, list | tuple) else [value]
    if len(values) not in (1, 3):
        raise arguments.fail(key, value, "a number, or one for each of three channels")
    numbers = [arguments.number(key, each) for each in values]
    return {FILL + n: (each, each) for n, each in enumerate(numbers * 3 if len(numbers) == 1 else numbers)}


def _crop(arguments: Arguments) -> list[Operation]:
    size = arguments.take("size")
    if isinstance(size, int) and not isinstance(size, bool):
        size = (size, size)
    if size is not None and not _is_size(size):
        raise arguments.fail("size", size, "[height, width] of the camera's images")
    area = arguments.pair("scale", arguments.take("scale", (0.08, 1.0)), 0.0)
    ratio = arguments.pair("ratio", arguments.take("ratio", (3 / 4, 4 / 3)), 0.0)
    arguments.choice("interpolation", "bilinear", "bilinear")
    arguments.choice("antialias", True, True, False, None)  # makes no difference: a crop is never larger
    if ratio[0] <= 0:
        raise arguments.fail("ratio", list(ratio), "numbers above 0")
    return [Operation(ImageOp.CROP, rectangle=Rectangle(area, ratio), size=size and (size[0], size[1]))]


def _is_size(size: Any) -> bool:
    return (
        isinstance(size, list | tuple)
        and len(size) == 2
        and all(isinstance(each, int) and each > 0 for each in size)
    )


def _blur(arguments: Arguments) -> list[Operation]:
    size = arguments.take("kernel_size")
    sizes = size if isinstance(size, list | tuple) else [size, size]
    odd = len(sizes) == 2 and all(isinstance(each, int) and each > 0 and each % 2 for each in sizes)
    if not odd:
        raise arguments.fail("kernel_size", size, "an odd number of pixels, or [x, y]")
    sigma = arguments.span("sigma", (0.1, 2.0), lambda value: (value, value), 0.0)
    assert sigma is not None
    if sigma[0] <= 0:
        raise arguments.fail("sigma", list(sigma), "numbers above 0")
    return [Operation(ImageOp.BLUR, {0: sigma, 1: (sizes[0], sizes[0]), 2: (sizes[1], sizes[1])})]


def _noise(arguments: Arguments) -> list[Operation]:
    """LeRobot's has `std`, a range in levels of 255; torchvision's `mean`, `sigma` and `clip`, of images in [0, 1]."""
    theirs = {"mean", "sigma", "clip"} & arguments.remaining.keys()
    if "std" in arguments.remaining or not theirs:
        span = arguments.span("std", (5.0, 25.0), lambda value: (0.0, value), 0.0)
        assert span is not None
        return [Operation(ImageOp.NOISE, {1: (span[0] / 255, span[1] / 255), 2: (1.0, 1.0)})]
    mean = arguments.number("mean", arguments.take("mean", 0.0))
    sigma = arguments.number("sigma", arguments.take("sigma", 0.1), 0.0)
    clip = float(arguments.choice("clip", True, True, False))
    return [Operation(ImageOp.NOISE, {0: (mean, mean), 1: (sigma, sigma), 2: (clip, clip)})]


def _erasing(arguments: Arguments) -> list[Operation]:
    probability = arguments.number("p", arguments.take("p", 0.5), 0.0, 1.0)
    area = arguments.pair("scale", arguments.take("scale", (0.02, 0.33)), 0.0, 1.0)
    ratio = arguments.pair("ratio", arguments.take("ratio", (0.3, 3.3)), 0.0)
    arguments.choice("inplace", False, True, False)
    if ratio[0] <= 0:
        raise arguments.fail("ratio", list(ratio), "numbers above 0")
    rectangle = Rectangle(area, ratio, probability)
    if arguments.remaining.get("value") == "random":
        arguments.take("value")
        return [Operation(ImageOp.ERASE_NOISE, rectangle=rectangle)]
    return [Operation(ImageOp.ERASE, _fill(arguments, "value"), rectangle=rectangle)]


KINDS: dict[str, Callable[[Arguments], list[Operation]]] = {
    "ColorJitter": _colour,
    "SharpnessJitter": _sharpness,
    "RandomAffine": _affine,
    "RandomResizedCrop": _crop,
    "GaussianBlur": _blur,
    "GaussianNoise": _noise,
    "RandomErasing": _erasing,
    "Identity": lambda _: [],
}
