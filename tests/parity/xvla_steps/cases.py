"""Steps of X-VLA's processing, by their names in files. Imported by both programs.

`settings` of a step are what we save of it, so LeRobot is also shown to accept that.
"""

import numpy as np

from parity.fill import uniform

TOP, SIDE = "observation.images.top", "observation.images.side"
OTHER = "observation.image"  # whose name LeRobot does not take for a camera's
KEYS = {"image_keys": None}
CASES = {
    "rotation": {"steps": {"xvla_rotation_6d_to_axis_angle": {"expected_action_dim": 10}}},
    "normalized": {
        "steps": {
            "xvla_image_to_float": {**KEYS, "validate_range": True},
            "xvla_imagenet_normalize": KEYS,
            "xvla_add_domain_id": {"domain_id": 4},
        }
    },
    "scaled": {
        "steps": {
            "xvla_image_scale": KEYS,
            "xvla_image_to_float": {**KEYS, "validate_range": False},
            "xvla_imagenet_normalize": KEYS,
        }
    },
    "one_camera": {
        "steps": {
            "xvla_image_to_float": {"image_keys": [OTHER], "validate_range": True},
            "xvla_imagenet_normalize": {"image_keys": [OTHER]},
        }
    },
}
for _name, _case in CASES.items():
    _case |= {"settings": {}, "name": _name}
STORED = {"out": 1e-6}


def observations() -> dict[str, np.ndarray]:
    """Pictures of odd sizes in [0, 1], as LeRobot's datasets and environments give them."""
    return {name: uniform(name, (2, 3, 7, 9), 0, 1) for name in (TOP, SIDE, OTHER)}


def actions() -> np.ndarray:
    return uniform("rotations", (16, 20), -1, 1)
