"""What torchvision makes of the images of `augment_cases.py`, for `tests/golden/augment.npz`.

    PYTHONPATH=tests python -m parity.augment_torchvision FILE.npz

The stored file was made by torchvision 0.26.0 in an environment of its own.
"""

import sys

import numpy as np
import torch
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional

from parity.augment_cases import CASES, DRAWS, HEIGHT, PARAMETERS, SIZE, WIDTH, image, summary


def computed(name: str, arguments: dict, frames: torch.Tensor) -> torch.Tensor:
    arguments = dict(arguments)
    if name == "resized_crop":
        arguments |= {"size": [HEIGHT, WIDTH], "antialias": True}
    if name == "erase":
        arguments["v"] = torch.tensor(arguments["v"])[:, None, None]
    if "interpolation" in arguments:
        arguments["interpolation"] = InterpolationMode(arguments["interpolation"])
    torch.manual_seed(0)  # of noise: the same with and without limits
    return getattr(functional, name)(frames, **arguments)


def draw_parameters(name: str, arguments: dict) -> np.ndarray:
    """Its parameters, drawn many times: a row of numbers each."""
    if name == "RandomResizedCrop":
        arguments = {"size": list(SIZE), **arguments}
    transform = getattr(v2, name)(**arguments)
    frames = [torch.zeros(3, *SIZE)]
    torch.manual_seed(1)
    return np.array([numbers(transform.make_params(frames)) for _ in range(DRAWS)], np.float64)


def numbers(params: dict) -> list[float]:
    if "brightness_factor" in params:
        return [params[f"{name}_factor"] for name in ("brightness", "contrast", "saturation", "hue")]
    if "angle" in params:
        return [params["angle"], *params["translate"], params["scale"], *params["shear"]]
    if "sigma" in params:
        return params["sigma"][:1]
    if params.get("v", 0) is None:  # nothing is erased
        return [0.0] * 4
    names = ("top", "left", "height", "width") if "top" in params else ("i", "j", "h", "w")
    return [params[name] for name in names]


def main(file: str) -> None:
    torch.set_num_threads(1)
    frames = torch.from_numpy(image())
    made = {f"image {name}": computed(*case, frames).numpy() for name, case in CASES.items()}
    made |= {f"drawn {name}": summary(draw_parameters(*case)) for name, case in PARAMETERS.items()}
    np.savez_compressed(file, **made)


if __name__ == "__main__":
    main(sys.argv[1])
