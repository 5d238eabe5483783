"""Image augmentation, compared with torchvision's. Imported by both programs."""

import numpy as np

from parity.fill import uniform

FRAMES, CHANNELS, HEIGHT, WIDTH = 2, 3, 14, 18
DRAWS = 20_000  # of parameters, whose distribution is compared
SIZE = (48, 64)  # of the images that they are for

# name -> torchvision's function, and its arguments
CASES: dict[str, tuple[str, dict]] = {
    "brightness darker": ("adjust_brightness", {"brightness_factor": 0.3}),
    "brightness brighter": ("adjust_brightness", {"brightness_factor": 1.7}),
    "contrast none": ("adjust_contrast", {"contrast_factor": 0.0}),
    "contrast more": ("adjust_contrast", {"contrast_factor": 1.6}),
    "saturation none": ("adjust_saturation", {"saturation_factor": 0.0}),
    "saturation more": ("adjust_saturation", {"saturation_factor": 1.5}),
    "hue back": ("adjust_hue", {"hue_factor": -0.5}),
    "hue a little": ("adjust_hue", {"hue_factor": 0.05}),
    "hue on": ("adjust_hue", {"hue_factor": 0.37}),
    "sharpness none": ("adjust_sharpness", {"sharpness_factor": 0.0}),
    "sharpness more": ("adjust_sharpness", {"sharpness_factor": 1.9}),
    "affine shift": (
        "affine",
        {"angle": 0.0, "translate": [3, -2], "scale": 1.0, "shear": [0.0, 0.0], "fill": 0},
    ),
    "affine rotation": (
        "affine",
        {"angle": -4.7, "translate": [1, 2], "scale": 1.0, "shear": [0.0, 0.0], "fill": 0},
    ),
    "affine all": (
        "affine",
        {
            "angle": 31.3,
            "translate": [-2, 1],
            "scale": 0.83,
            "shear": [7.7, -12.2],
            "fill": [0.1, 0.9, 0.4],
            "center": [3.0, 5.5],
        },
    ),
    "affine bilinear": (
        "affine",
        {
            "angle": 17.1,
            "translate": [2, 1],
            "scale": 1.3,
            "shear": [-5.0, 3.0],
            "fill": [0.2, 0.7, 0.5],
            "interpolation": "bilinear",
        },
    ),
    "crop of the middle": ("resized_crop", {"top": 3, "left": 2, "height": 7, "width": 11}),
    "crop of a pixel": ("resized_crop", {"top": 13, "left": 17, "height": 1, "width": 1}),
    "crop of all": ("resized_crop", {"top": 0, "left": 0, "height": HEIGHT, "width": WIDTH}),
    "blur": ("gaussian_blur", {"kernel_size": [5, 5], "sigma": [1.3, 1.3]}),
    "blur in two sizes": ("gaussian_blur", {"kernel_size": [7, 3], "sigma": [2.0, 2.0]}),
    "noise": ("gaussian_noise", {"mean": 0.1, "sigma": 0.4, "clip": False}),
    "noise within limits": ("gaussian_noise", {"mean": 0.1, "sigma": 0.4, "clip": True}),
    "erase": ("erase", {"i": 2, "j": 5, "h": 6, "w": 4, "v": [0.3, 0.6, 0.9]}),
}

# name -> torchvision's class, and its arguments, without the size of a crop
PARAMETERS: dict[str, tuple[str, dict]] = {
    "crop": ("RandomResizedCrop", {}),
    "crop that often does not fit": ("RandomResizedCrop", {"scale": [0.7, 1.0], "ratio": [1.8, 2.5]}),
    "crop that never fits": ("RandomResizedCrop", {"scale": [1.0, 1.0], "ratio": [0.3, 0.5]}),
    "erasing": ("RandomErasing", {"p": 1.0}),
    "erasing that often does not fit": (
        "RandomErasing",
        {"p": 1.0, "scale": [0.6, 0.9], "ratio": [0.3, 3.3]},
    ),
    "affine": (
        "RandomAffine",
        {"degrees": [-5.0, 5.0], "translate": [0.05, 0.05], "scale": [0.8, 1.1], "shear": [-3, 3, 1, 2]},
    ),
    "colour": ("ColorJitter", {"brightness": 0.5, "contrast": [0.8, 1.2], "saturation": 2.0, "hue": 0.1}),
    "blur": ("GaussianBlur", {"kernel_size": 5, "sigma": [0.1, 2.0]}),
}


def image() -> np.ndarray:
    """Frames [T, C, H, W] in [0, 1], with pixels without a hue, and with two channels that are equal."""
    made = uniform("augment", (FRAMES, CHANNELS, HEIGHT, WIDTH), 0, 1)
    made[:, :, 0, :6] = np.array([0.0, 1.0, 0.5, 0.2, 0.8, 0.3])
    made[:, 0, 1, :6] = made[:, 1, 1, :6]
    made[:, 1, 2, :6] = made[:, 2, 2, :6]
    made[:, 0, 3, :6] = made[:, 2, 3, :6]
    made[:, :, 4, :3] = np.eye(3)
    return made


def summary(rows: np.ndarray) -> np.ndarray:
    """Means, standard deviations and quantiles of each number, and how the numbers of a row hang together."""
    together = np.corrcoef(rows + 1e-9 * np.arange(len(rows))[:, None], rowvar=False).reshape(-1)
    return np.concatenate(
        [rows.mean(0), rows.std(0), np.quantile(rows, (0.1, 0.5, 0.9), axis=0).ravel(), together]
    )
