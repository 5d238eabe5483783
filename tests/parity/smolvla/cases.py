"""The SmolVLAs that are compared, what they are shown and told. Imported by both programs."""

import numpy as np

from parity.inputs import STATE, actions, camera, observation
from parity.kinds import FOLDER
from parity.smolvla.vlms import make_vlms

STEPS = 8  # of acting: several chunks
PARTS = ()
TINY = {
    "vlm_model_name": f"{FOLDER}/tiny-vlm",
    "load_vlm_weights": False,  # all weights are filled in
    "num_vlm_layers": 4,
    "chunk_size": 8,
    "n_action_steps": 4,
    "num_steps": 4,
    "max_state_dim": 6,
    "max_action_dim": 5,
    "resize_imgs_with_padding": (32, 32),
    "tokenizer_max_length": 12,
    "expert_width_multiplier": 0.5,
}
MODES = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}


def case(inputs: dict, acts: bool = True, robot: dict | None = None, **settings: object) -> dict:
    """`robot`: what is observed, where it is less or has other sizes than the policy's inputs."""
    return {
        "inputs": inputs,
        "robot": robot or inputs,
        "settings": {**TINY, "normalization_mapping": MODES, **settings},
        "acts": acts,
    }


def in_bf16(inputs: dict, **settings: object) -> dict:
    """LeRobot computes in bfloat16. Flexor does so only when it acts."""
    return {**case(inputs, load_vlm_weights=True, **settings), "in_bf16": True}


ONE_CAMERA = STATE | camera("top")
TWO_CAMERAS = STATE | camera("wrist", 56, 40) | camera("above")
OTHER = {"observation.state": ("STATE", (5,))} | camera("above", 48, 72)
ALL = {"train_expert_only": False, "freeze_vision_encoder": False}
EDGES = {"add_image_special_tokens": True}
ALWAYS_CROSS = {"self_attn_every_n_layers": -1}
SELF = {"attention_mode": "self_attn"}
CASES = {
    "frozen": case(ONE_CAMERA),
    "width": case(
        ONE_CAMERA, expert_width_multiplier=0.75, max_state_dim=32, max_action_dim=32, num_steps=10
    ),
    "all": case(ONE_CAMERA, **ALL),
    "frozen_vision": case(TWO_CAMERAS, train_expert_only=False),
    "frozen_state": case(ONE_CAMERA, train_state_proj=False),
    "two_cameras": case(TWO_CAMERAS, prefix_length=30),
    "one_missing": case(ONE_CAMERA, empty_cameras=1),
    "two_missing": case(ONE_CAMERA, empty_cameras=2, **EDGES),
    "special_tokens": case(TWO_CAMERAS, **EDGES),
    "special_tokens_all": case(ONE_CAMERA, prefix_length=40, **EDGES, **ALL),
    "self_attention": case(ONE_CAMERA, **SELF),
    "self_attention_all": case(TWO_CAMERAS, **SELF, **ALL),
    "always_cross": case(ONE_CAMERA, **ALWAYS_CROSS),
    "never_cross": case(ONE_CAMERA, self_attn_every_n_layers=1),
    "every_third": case(ONE_CAMERA, self_attn_every_n_layers=3, num_vlm_layers=-1),
    "half_as_many": case(ONE_CAMERA, num_expert_layers=2, **ALWAYS_CROSS),
    # LeRobot can't act where a layer of self-attention has no layer of the expert
    "half_as_many_all": case(TWO_CAMERAS, False, num_expert_layers=2, **SELF, **ALL),
    "one_layer_all": case(ONE_CAMERA, False, num_expert_layers=1, **ALL),
    "padded_words": case(ONE_CAMERA, pad_language_to="max_length"),
    "truncated": case(ONE_CAMERA, tokenizer_max_length=3),
    "large_images": case(ONE_CAMERA, resize_imgs_with_padding=(64, 64)),
    "small_images": case(TWO_CAMERAS, resize_imgs_with_padding=(16, 16)),
    # as LeRobot fine-tunes a published policy: its config keeps the cameras and sizes of the first robot
    "fewer_cameras": case(TWO_CAMERAS, robot=OTHER),
    "fewer_cameras_one_missing": case(TWO_CAMERAS, robot=OTHER, empty_cameras=1, **EDGES),
    "fewer_cameras_all": case(TWO_CAMERAS, robot=OTHER, **EDGES, **ALL),
    "right_size": case(STATE | camera("top", 32, 32)),
    # LeRobot can't read null
    "not_resized": {
        **case(STATE | camera("top", 32, 32)),
        "ours": {"resize_imgs_with_padding": None},
    },
    "bf16": in_bf16(ONE_CAMERA),
    "bf16_width": in_bf16(ONE_CAMERA, expert_width_multiplier=0.75, num_steps=10),
    "bf16_special_tokens": in_bf16(TWO_CAMERAS, **EDGES),
    "bf16_self_attention": in_bf16(TWO_CAMERAS, **SELF, **ALL),
    "bf16_always_cross": in_bf16(ONE_CAMERA, **ALWAYS_CROSS),
    "bf16_half_as_many": in_bf16(ONE_CAMERA, num_expert_layers=2, **ALWAYS_CROSS),
    "bf16_small_images": in_bf16(TWO_CAMERAS, resize_imgs_with_padding=(16, 16)),
    # fractions of 6 are not exact in bfloat16: a patch takes its neighbour's position
    "bf16_six_patches": in_bf16(
        ONE_CAMERA, vlm_model_name=f"{FOLDER}/six-patches-vlm", resize_imgs_with_padding=(48, 48)
    ),
}


make_files = make_vlms


def training_batch(case: dict) -> dict[str, np.ndarray]:
    return {**observation(case["robot"], "training"), **actions(case["settings"]["chunk_size"], (1, 4))}


# of the golden numbers (limits.py): the shortest period of the time's sines is 0.004, and each integration step
# multiplies what rounding did
STORED = {"actions": 5e-5}

# the policies that one program trains and the other acts with; what is changed for the second
TRAINED = {
    "vlm_model_name": f"{FOLDER}/tiny-vlm",
    "load_vlm_weights": "false",
    "num_vlm_layers": 4,
    "chunk_size": 8,
    "n_action_steps": 4,
    "num_steps": 4,
    "resize_imgs_with_padding": "[32,32]",
    "tokenizer_max_length": 12,
}
TRAINED_OTHERWISE = {
    "train_expert_only": "false",
    "freeze_vision_encoder": "false",
    "self_attn_every_n_layers": -1,
    "add_image_special_tokens": "true",
    "num_expert_layers": 2,
}
