"""The EO-1s that are compared, what they are shown and told. Imported by both programs."""

from typing import Any

import numpy as np
import torch

from parity.eo1.qwen import make_qwens
from parity.inputs import BATCH, STATE, actions, camera, observation
from parity.kinds import FOLDER
from parity.limits import IN_BF16
from parity.records import values

STEPS = 8  # of acting: several chunks
PARTS = ()
TOKEN = 28 * 28  # pixels
TINY: dict[str, Any] = {
    "vlm_base": f"{FOLDER}/tiny-qwen",
    "dtype": "float32",
    "chunk_size": 8,
    "n_action_steps": 4,
    "num_denoise_steps": 4,
    "max_state_dim": 6,
    "max_action_dim": 5,
    "image_min_pixels": TOKEN,
    "image_max_pixels": 12 * TOKEN,
}
MODES = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}


def case(inputs: dict, **settings: object) -> dict:
    return {"inputs": inputs, "settings": {**TINY, "normalization_mapping": MODES, **settings}}


def in_bf16(inputs: dict, **settings: object) -> dict:
    """The default for published weights. LeRobot trains in bfloat16 too, but here only acting is compared."""
    return {**case(inputs, dtype="bfloat16", **settings), "in_bf16": True}


ONE_CAMERA = STATE | camera("top")
THREE_CAMERAS = STATE | camera("wrist", 33, 70) | camera("above", 50, 120) | camera("left", 90, 31)
PUBLISHED = {"image_min_pixels": 64 * TOKEN, "image_max_pixels": 128 * TOKEN}
CASES = {
    "default": case(ONE_CAMERA),
    "three_cameras": case(THREE_CAMERAS),
    "published_pixels": case(STATE | camera("top", 48, 64), **PUBLISHED),
    "shrunk": case(STATE | camera("top", 200, 310)),
    "published_width": case(ONE_CAMERA, max_state_dim=32, max_action_dim=32, num_denoise_steps=10),
    "real_values": case(ONE_CAMERA, supervise_padding_action_dims=False),
    "real_actions": case(ONE_CAMERA, supervise_padding_actions=False),
    "nothing_padded": case(
        THREE_CAMERAS, supervise_padding_action_dims=False, supervise_padding_actions=False
    ),
    "one_layer": case(ONE_CAMERA, num_action_layers=1),
    "three_layers": case(ONE_CAMERA, num_action_layers=3, action_act="gelu"),
    "untied": case(ONE_CAMERA, vlm_base=f"{FOLDER}/untied-qwen"),
    "recomputed": case(ONE_CAMERA, gradient_checkpointing=True),
    "times": case(
        ONE_CAMERA,
        min_period=0.01,
        max_period=2.0,
        time_sampling_scale=0.9,
        time_sampling_offset=0.05,
    ),
    "normalized_images": case(ONE_CAMERA, normalization_mapping={**MODES, "VISUAL": "MEAN_STD"}),
    "bf16": in_bf16(ONE_CAMERA),
    "bf16_three_cameras": in_bf16(THREE_CAMERAS, num_denoise_steps=10),
}


make_files = make_qwens


def training_batch(case: dict) -> dict[str, np.ndarray]:
    return {**observation(case["robot"], "training"), **actions(case["settings"]["chunk_size"], (1, 4))}


def prompts(tokens: torch.Tensor, mask: torch.Tensor, action: int) -> list[list[int]]:
    """The tokens of each sample up to the last action, without padding."""
    rows = [row[valid.bool()].tolist() for row, valid in zip(tokens, mask)]
    return [row[: len(row) - row[::-1].index(action)] for row in rows]


def pixels(patches: torch.Tensor) -> list:
    """Of patches [N, 588], some, and moments of all."""
    patches = patches.reshape(BATCH, -1, 588)
    return [
        patches.double().mean().item(),
        patches.double().square().mean().item(),
        values(patches[:, ::5, ::49]),
    ]


# of the golden numbers (limits.py): the shortest period of the time's sines is 0.004, and each integration step
# multiplies what rounding did
STORED = {"actions": 5e-5, "prompts": 0, "pixels": 1e-6}

# Positions are rotated in float32, which `transformers` does in bfloat16: 0.005
LIVE = {"actions_in_bf16": IN_BF16}

# the policies that one program trains and the other acts with; what is changed for the second
TRAINED = {
    "vlm_base": f"{FOLDER}/tiny-qwen",
    "dtype": "float32",
    "chunk_size": 8,
    "n_action_steps": 4,
    "num_denoise_steps": 4,
    "image_min_pixels": TOKEN,
    "image_max_pixels": 12 * TOKEN,
}
TRAINED_OTHERWISE = {
    "supervise_padding_actions": "false",
    "supervise_padding_action_dims": "false",
    "gradient_checkpointing": "true",
    "num_action_layers": 3,
    "action_act": "silu",
}
