"""Image transforms for tests: every operation, each with its type and arguments."""

from typing import Any

ALL: dict[str, tuple[str, dict[str, Any]]] = {
    "brightness": ("ColorJitter", {"brightness": [0.5, 1.5]}),
    "contrast": ("ColorJitter", {"contrast": [0.5, 1.5]}),
    "saturation": ("ColorJitter", {"saturation": [0.5, 1.5]}),
    "hue": ("ColorJitter", {"hue": [-0.5, 0.5]}),
    "sharpness": ("SharpnessJitter", {"sharpness": [0.0, 2.0]}),
    "affine": (
        "RandomAffine",
        {"degrees": 40, "translate": [0.1, 0.1], "shear": [-9, 9], "fill": [0.1, 0.2, 0.3]},
    ),
    "smooth": (
        "RandomAffine",
        {"degrees": 40, "scale": [0.8, 1.2], "interpolation": "bilinear", "center": [3, 4]},
    ),
    "crop": ("RandomResizedCrop", {}),
    "blur": ("GaussianBlur", {"kernel_size": [5, 3], "sigma": [0.1, 3.0]}),
    "noise": ("GaussianNoise", {}),
    "erase": ("RandomErasing", {"p": 1.0, "value": [0.1, 0.2, 0.3]}),
    "erase with noise": ("RandomErasing", {"p": 1.0, "value": "random"}),
    "jitter": ("ColorJitter", {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.2}),
}
