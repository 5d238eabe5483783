"""Our side of `augment_cases.py`: images by the operations in torch, parameters by keyed noise."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from flexor.core.rng import Noise
from flexor.data.settings import ImageTransformConfig, ImageTransformsConfig
from flexor.policies.augment import plain
from flexor.policies.augment.draw import TransformSampler
from flexor.policies.augment.operations import FILL, NUMBERS, ImageOp, read_transforms
from parity.augment_cases import CASES, DRAWS, HEIGHT, PARAMETERS, SIZE, WIDTH, image, summary

GOLDEN = Path(__file__).parents[1] / "golden" / "augment.npz"
NEAR = 5e-6  # of values in [0, 1]; nearest neighbours have no middle way
# Noise in the means of two samples of this size: 5 standard deviations; ratios and correlations are about 1.
SPREAD = 5 * math.sqrt(2 / DRAWS)

FACTORS = {
    "adjust_brightness": ImageOp.BRIGHTNESS,
    "adjust_contrast": ImageOp.CONTRAST,
    "adjust_saturation": ImageOp.SATURATION,
    "adjust_hue": ImageOp.HUE,
    "adjust_sharpness": ImageOp.SHARPNESS,
}


def operation(name: str, arguments: dict) -> tuple[ImageOp, torch.Tensor]:
    """torchvision's function and arguments as an operation with its numbers."""
    numbers = torch.zeros(NUMBERS)
    op = FACTORS.get(name)
    if op is not None:
        numbers[0] = next(iter(arguments.values()))
    elif name == "affine":
        op = (
            ImageOp.AFFINE_BILINEAR
            if arguments.get("interpolation") == "bilinear"
            else ImageOp.AFFINE_NEAREST
        )
        shear = [math.radians(each) for each in arguments["shear"]]
        centre = arguments.get("center", [WIDTH / 2, HEIGHT / 2])
        numbers[:8] = torch.tensor(
            [
                math.radians(arguments["angle"]),
                *arguments["translate"],
                arguments["scale"],
                *shear,
                centre[0] - WIDTH / 2,
                centre[1] - HEIGHT / 2,
            ]
        )
        numbers[FILL : FILL + 3] = torch.tensor(arguments["fill"])
    elif name == "resized_crop":
        op, numbers[:4] = ImageOp.CROP, torch.tensor([*arguments.values()])
    elif name == "gaussian_blur":
        op, numbers[0] = ImageOp.BLUR, arguments["sigma"][0]
        numbers[1:3] = torch.tensor(arguments["kernel_size"])
    elif name == "gaussian_noise":
        op, numbers[:3] = ImageOp.NOISE, torch.tensor([float(each) for each in arguments.values()])
    else:
        op, numbers[:4] = ImageOp.ERASE, torch.tensor([arguments[each] for each in "ijhw"])
        numbers[FILL : FILL + 3] = torch.tensor(arguments["v"])
    return op, numbers[None]


def computed(name: str, theirs: np.lib.npyio.NpzFile) -> np.ndarray:
    """What we make of the same images. Noise is theirs."""
    op, numbers = operation(*CASES[name])
    frames = torch.from_numpy(image())[None]
    if op is ImageOp.NOISE:
        mean, sigma = CASES["noise"][1]["mean"], CASES["noise"][1]["sigma"]
        noise = (torch.from_numpy(theirs["image noise"]) - frames - mean) / sigma
        return plain.add_noise(frames, numbers, noise)[0].numpy()
    reach = int(numbers[0, 1:3].max()) // 2 if op is ImageOp.BLUR else 0
    return plain.apply(op, frames, numbers, None, reach)[0].numpy()


def draw_parameters(name: str) -> np.ndarray:
    kind, arguments = PARAMETERS[name]
    settings = ImageTransformsConfig(True, 1, False, {"one": ImageTransformConfig(1.0, kind, arguments)})
    noise = Noise(3, 5, torch.arange(DRAWS))
    draws = TransformSampler(read_transforms(settings), 1, False, [SIZE])(noise, DRAWS, torch.device("cpu"))
    numbers = draws.numbers[:, 0].double()
    if kind == "ColorJitter":  # in an order of its own for each
        order = draws.ops[:, 0].argsort(-1)
        return numbers[..., 0].gather(1, order).numpy()
    if kind == "RandomAffine":
        numbers[:, :, [0, 4, 5]] = numbers[:, :, [0, 4, 5]].rad2deg()
        return numbers[:, 0, :6].numpy()
    if kind == "GaussianBlur":
        return numbers[:, 0, :1].numpy()
    return (numbers[:, 0, :4] * (numbers[:, 0, 2:3] > 0)).numpy()


def differences(theirs: np.lib.npyio.NpzFile) -> Iterator[tuple[str, float, float]]:
    """What is compared, how far it is off, and how far it may be."""
    for name in CASES:
        yield f"image {name}", float(np.abs(computed(name, theirs) - theirs[f"image {name}"]).max()), NEAR
    for name in PARAMETERS:
        rows = draw_parameters(name)
        # each statistic in units of its number's spread; a quantile of whole pixels can be one off
        units = np.maximum(rows.std(0), 1e-6)
        tolerance = np.where(np.all(rows == np.round(rows), axis=0), 1.5, 0.05 * units)
        ours, reference = summary(rows), theirs[f"drawn {name}"]
        n = rows.shape[1]
        scale = np.concatenate([units, units, *[tolerance / SPREAD] * 3, np.ones(n * n)])
        yield f"drawn {name}", float((np.abs(ours - reference) / scale).max()), SPREAD
