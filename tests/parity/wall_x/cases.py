"""The WALL-Xs that are compared, what they are shown and told. Imported by both programs."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from parity.inputs import BATCH, STATE, actions, camera, observation
from parity.kinds import FOLDER
from parity.limits import IN_BF16
from parity.pi0_fast.cases import make_fast
from parity.records import gradients as gradient_norms
from parity.records import values
from parity.wall_x.models import make_walls

STEPS = 8  # of acting: several chunks
PARTS = ()
TINY: dict[str, Any] = {
    "pretrained_name_or_path": f"{FOLDER}/tiny-wall",
    "chunk_size": 8,
    "n_action_steps": 4,
    "max_state_dim": 6,
    "max_action_dim": 5,
}
MODES = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
FLOAT32 = {"dtype": "float32"}


def case(inputs: dict, **settings: object) -> dict:
    return {
        "inputs": inputs,
        "settings": {**TINY, "normalization_mapping": MODES, **settings},
        "ours": FLOAT32,
    }


def fast(inputs: dict, **settings: object) -> dict:
    """LeRobot writes actions for one robot only, and fails where their number is not that of the padded ones."""
    words = {"prediction_mode": "fast", "action_tokenizer_path": f"{FOLDER}/fast"}
    return {**case(inputs, **words, **settings), "acts": False}


def in_bf16(inputs: dict, **settings: object) -> dict:
    """LeRobot's only type; only acting is compared."""
    return {**case(inputs, **settings), "ours": {}, "in_bf16": True}


ONE_CAMERA = STATE | camera("top", 33, 70)
THREE_CAMERAS = (
    STATE | camera("left_wrist_view", 70, 33) | camera("above", 50, 120) | camera("face_view", 90, 90)
)
CASES = {
    "default": case(ONE_CAMERA),
    "three_cameras": case(THREE_CAMERAS, chunk_size=5),
    "large_image": case(STATE | camera("top", 31, 290)),
    "narrow_experts": case(ONE_CAMERA, pretrained_name_or_path=f"{FOLDER}/narrow-wall"),
    "dense": case(ONE_CAMERA, pretrained_name_or_path=f"{FOLDER}/dense-wall"),
    "fast": fast(ONE_CAMERA),
    "fast_untied": fast(THREE_CAMERAS, pretrained_name_or_path=f"{FOLDER}/narrow-wall", chunk_size=5),
    "bf16": in_bf16(ONE_CAMERA),
    "bf16_three_cameras": in_bf16(THREE_CAMERAS),
}


def make_files(folder: Path) -> None:
    make_walls(folder)
    make_fast(folder / "fast")


def training_batch(case: dict) -> dict[str, np.ndarray]:
    return {**observation(case["robot"], "training"), **actions(case["settings"]["chunk_size"], (1, 4))}


def prompts(tokens: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """The tokens of each sample, without padding. After an answer LeRobot shows it, with the number 0."""
    rows = [row[valid.bool()].tolist() for row, valid in zip(tokens, mask)]
    return [row[: max(n for n, token in enumerate(row, 1) if token)] for row in rows]


def pixels(patches: torch.Tensor) -> list:
    """Of patches [N, 588], some, and moments of all."""
    patches = patches.reshape(BATCH, -1, 588)
    return [
        patches.double().mean().item(),
        patches.double().square().mean().item(),
        values(patches[:, ::5, ::49]),
    ]


def gradients(policy: Any) -> list[float | None]:
    """What has no part in the loss has no gradient, or one of zeros: in fast mode, layers around noisy actions."""
    return [norm or None for norm in gradient_norms(policy)]


# of the golden numbers (limits.py): each integration step multiplies what rounding did
STORED = {"actions": 5e-5, "prompts": 0, "pixels": 1e-6}

# Positions are rotated in float32, which `transformers` does in bfloat16
LIVE = {"actions_in_bf16": IN_BF16}

# what LeRobot trains is in bfloat16, which both programs compute with in float32 afterwards
ACTS_WITH = FLOAT32

# the policies that one program trains and the other acts with; what is changed for the second
TRAINED = TINY
TRAINED_OTHERWISE = {
    "pretrained_name_or_path": f"{FOLDER}/narrow-wall",
    "chunk_size": 6,
    "n_action_steps": 3,
    "vision_attn_implementation": "sdpa",
}
