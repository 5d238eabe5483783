"""The pi0s that are compared, what they are shown and told. Imported by both programs."""

from typing import Any

import numpy as np

from parity.fill import fill
from parity.inputs import STATE, actions, camera, observation
from parity.kinds import FOLDER
from parity.pi0.small import make_tokenizer

STEPS = 5  # of acting: two chunks
PARTS = ()
TINY = {
    "chunk_size": 6,
    "n_action_steps": 4,
    "num_inference_steps": 2,
    "image_resolution": (28, 28),
    "tokenizer_max_length": 26,
}
MODES = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
MIN_MAX = {"VISUAL": "IDENTITY", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"}
TIMES = {
    "time_sampling_scale": 0.7,
    "time_sampling_offset": 0.2,
    "min_period": 0.1,
    "max_period": 2.0,
}


def case(inputs: dict, robot: dict | None = None, **settings: object) -> dict:
    """`ours`: settings that LeRobot has not. `robot`: what is observed, where that differs from the inputs."""
    settings = {**TINY, "normalization_mapping": MODES, **settings}
    return {
        "inputs": inputs,
        "robot": robot or inputs,
        "settings": settings,
        "ours": {"tokenizer_name": FOLDER},
    }


ONE_CAMERA = STATE | camera("top")
# one action of each chunk: to later ones LeRobot adds the state at that time, not the one they are relative to
RELATIVE = {"use_relative_actions": True, "n_action_steps": 1}
TWO_CAMERAS = STATE | camera("wrist", 33, 70) | camera("above", 64, 48)
CASES = {
    "default": case(ONE_CAMERA),
    "two_cameras": case(TWO_CAMERAS),
    # as LeRobot fine-tunes a published policy: its config keeps the cameras and sizes of the first robot
    "fewer_cameras": case(
        TWO_CAMERAS, robot={"observation.state": ("STATE", (5,))} | camera("above", 48, 72)
    ),
    "empty_camera": case(TWO_CAMERAS, empty_cameras=2),
    "expert_only": case(ONE_CAMERA, train_expert_only=True),
    "frozen_vision": case(ONE_CAMERA, freeze_vision_encoder=True),
    "recomputed": case(ONE_CAMERA, gradient_checkpointing=True),
    "other_times": case(ONE_CAMERA, **TIMES, num_inference_steps=5),
    "other_sizes": case(
        ONE_CAMERA, max_state_dim=7, max_action_dim=5, image_resolution=(42, 42), chunk_size=9
    ),
    "small_reader": case(ONE_CAMERA, paligemma_variant="gemma_300m", action_expert_variant="gemma_2b"),
    "min_max": case(ONE_CAMERA, normalization_mapping=MIN_MAX),
    "relative": case(ONE_CAMERA, **RELATIVE),
    "relative_but_one": case(
        ONE_CAMERA,
        **RELATIVE,
        relative_exclude_joints=["grip"],
        action_feature_names=["x", "y", "gripper"],
    ),
    "truncated": case(ONE_CAMERA, tokenizer_max_length=8),
}


make_files = make_tokenizer
STORED = {"actions": 5e-5}  # each step multiplies what rounding did


def training_batch(case: dict) -> dict[str, np.ndarray]:
    """Observations and actions. Padded ones count like all others."""
    return {
        **observation(case["robot"], "training"),
        **actions(case["settings"]["chunk_size"], (1, 4)),
    }


def is_head(name: str) -> bool:
    """Of the language heads, which LeRobot has and nothing uses."""
    return name.endswith("lm_head.weight")


class _WithoutHeads:
    def __init__(self, policy: Any):
        self.policy = policy

    def state_dict(self) -> dict:
        return {name: value for name, value in self.policy.state_dict().items() if not is_head(name)}

    def named_parameters(self) -> list:
        return [(name, value) for name, value in self.policy.named_parameters() if not is_head(name)]


def fill_policy(policy: Any) -> str:
    return fill(_WithoutHeads(policy))  # type: ignore[arg-type]
