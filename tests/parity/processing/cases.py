"""Steps around vision-language-action policies, and how images are resized. Imported by both programs.

`settings` of a step are what we save of it, so LeRobot is also shown to accept that.
"""

import numpy as np
import torch

from parity.fill import uniform
from parity.records import values

TASKS = ["pick up_the cube\n", "  open the drawer ", "wipe\nthe table\n"]
EDGES = [-1.5, -1.0, -0.99999994, -0.9921875, -0.5, 0.0, 0.9921874, 0.9921875, 1.0, 7.0]  # of bins
SIZES = {
    "wide": ((3, 48, 64), 28, 28),
    "high": ((3, 65, 30), 28, 42),
    "enlarged": ((3, 9, 17), 40, 40),
    "odd border": ((3, 31, 64), 28, 29),
    "as it is": ((3, 28, 28), 28, 28),
}
LENGTHS, CHUNK = (9, 3, 14, 7), 5  # of episodes, of a chunk
STORED = {
    "chunk": 1e-5,
    "pixels": 1e-6,
    "normalized": 1e-6,
    "relative": 1e-7,
    "absolute": 1e-7,
    "stats": 1e-6,
}

_SETTINGS: dict[str, dict] = {
    f"{where} {name}": {"shape": shape, "height": height, "width": width, "where": where}
    for where in ("centre", "left-top")
    for name, (shape, height, width) in SIZES.items()
}
_SETTINGS |= {name: {} for name in ("smolvla_new_line_processor", "pi0_new_line_processor")}
_SETTINGS |= {
    name: {"max_state_dim": 32, "task_key": "task"}
    for name in (
        "pi05_prepare_state_tokenizer_processor_step",
        "pi0_fast_prepare_state_tokenizer_processor_step",
    )
}
_SETTINGS |= {
    f"relative {name}": {"enabled": True, "exclude_joints": exclude, "action_names": names}
    for name, exclude, names in [
        ("all", [], None),
        ("without names", ["gripper"], None),
        ("named", ["GRIP", "wrist"], ["shoulder", "Left_gripper", "wrist.pos", "gripper"]),
        ("few names", ["gripper"], ["gripper"]),
    ]
}
_SETTINGS |= {
    f"real time {schedule} {delay} {left}": {
        "prefix_attention_schedule": schedule,
        "max_guidance_weight": 5.0,
        "execution_horizon": 6,
        "delay": delay,
        "left": left,
    }
    for schedule, delay, left in [
        ("ZEROS", 3, 8),
        ("ONES", 3, 8),
        ("LINEAR", 2, 8),
        ("LINEAR", 9, 8),
        ("LINEAR", 0, 4),
        ("EXP", 2, 12),
    ]
}
NAMES = ("observation.images.top", "observation.images.side", "observation.state", "observation.other")
_SETTINGS |= {
    f"rename {name}": {"rename_map": {f"observation.{a}": f"observation.{b}" for a, b in names.items()}}
    for name, names in {
        "nothing": {},
        "some": {"images.top": "images.camera1", "state": "joints"},
        "two of them round": {"images.top": "images.side", "images.side": "images.top"},
        "what is not there": {"images.none": "images.camera1"},
    }.items()
}
_SETTINGS |= {
    f"normalize {name}": {
        "eps": 1e-8,
        "features": {
            key: {"type": "ACTION" if key == "action" else "STATE", "shape": [4]}
            for key in ("observation.state", "observation.other", "action")
        },
        "norm_map": {"STATE": "MEAN_STD", "ACTION": "MIN_MAX"},
        **keys,
    }
    for name, keys in {
        "all": {},
        "one": {"normalize_observation_keys": ["observation.other"]},
        "none": {"normalize_observation_keys": []},
    }.items()
}
CASES = {name: {"name": name, "settings": settings} for name, settings in _SETTINGS.items()}


def images(shape: tuple[int, ...]) -> np.ndarray:
    return uniform("images", (2, *shape), 0, 1)


def states() -> np.ndarray:
    """[3, 10] normalised states."""
    values = uniform("state", (3, len(EDGES)), -1.2, 1.2)
    values[0] = EDGES
    return values


def some(pixels: torch.Tensor) -> list:
    """Rows and columns on average, which show where the border is, and every fifth row of one channel."""
    return [values(pixels.mean(-1)), values(pixels.mean(-2)), values(pixels[0, 0, ::5])]


def chunk_noise() -> np.ndarray:
    return uniform("noise", (2, 12, 5), -2, 2)


def left_over(count: int) -> np.ndarray:
    return uniform("left over", (2, count, 3), -1, 1)


def velocity(x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    """In place of a network."""
    return torch.sin(2 * x) + time[:, None, None] * x


def normalized_values() -> dict[str, dict[str, np.ndarray]]:
    """Observations and an action, and their statistics, by name."""
    names = ("observation.state", "observation.other", "action")
    return {
        "values": {name: uniform(f"{name} to normalise", (3, 4), -2, 2) for name in names},
        "stats": {
            f"{name}.{which}": uniform(f"{name} {which}", (4,), low, low + 0.5)
            for name in names
            for which, low in (("mean", 0), ("std", 1), ("min", -3), ("max", 2))
        },
    }


def actions(*shape: int) -> np.ndarray:
    return uniform("action", (3, *shape, 4), -2, 2)


def recorded() -> dict[str, np.ndarray]:
    """The columns of a dataset."""
    frames = sum(LENGTHS)
    return {
        "action": uniform("recorded action", (frames, 4), -2, 2),
        "observation.state": uniform("recorded state", (frames, 5), -1, 1),
        "episode_index": np.repeat(np.arange(len(LENGTHS)), LENGTHS),
    }
