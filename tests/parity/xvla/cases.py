"""The X-VLAs that are compared, what they are shown and told. Imported by both programs."""

import copy
import json
from pathlib import Path

import numpy as np

from parity.inputs import STATE, action_of, actions, camera, observation
from parity.kinds import FOLDER
from support.tokenizers import make_tokenizer

STEPS = 8  # of acting: several chunks
PARTS = (
    *("position_loss", "rotate6D_loss", "gripper_loss"),
    *("joints_loss", "left_arm_loss", "right_arm_loss"),
)
FLORENCE = {
    "vision_config": {
        "embed_dim": [8, 16, 16, 32],
        "depths": [1, 1, 2, 1],
        "num_heads": [1, 2, 2, 4],
        "num_groups": [2, 2, 2, 4],
        "window_size": 4,
        "projection_dim": 16,
        "drop_path_rate": 0.0,
    },
    "text_config": {
        "model_type": "bart",
        "d_model": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_layers": 1,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 32,
        "vocab_size": 60,
        "max_position_embeddings": 64,
        "dropout": 0.0,
    },
}
TINY = {
    "florence_config": FLORENCE,
    "tokenizer_name": f"{FOLDER}/tokenizer",
    "tokenizer_max_length": 12,
    "chunk_size": 8,
    "n_action_steps": 4,
    "hidden_size": 16,
    "depth": 2,
    "num_heads": 2,
    "mlp_ratio": 2.0,
    "num_domains": 3,
    "len_soft_prompts": 2,
    "dim_time": 6,
    "max_len_seq": 64,
    "action_mode": "auto",
    "num_denoising_steps": 4,
    "max_state_dim": 20,
    "max_action_dim": 5,
}
IDENTITY = {"VISUAL": "IDENTITY", "STATE": "IDENTITY", "ACTION": "IDENTITY"}


def case(
    inputs: dict, width: int | None = None, acts: bool = True, robot: dict | None = None, **settings: object
) -> dict:
    """`width`: values of the action; `robot`: what is observed, where it is less than the policy's inputs."""
    described = {
        "inputs": inputs,
        "robot": robot or inputs,
        "settings": {**TINY, "normalization_mapping": IDENTITY, **settings},
        "ours": {"dropout": 0.0},  # LeRobot's is set to 0
        "acts": acts,
    }
    return described if width is None else {**described, "action": {"action": ("ACTION", (width,))}}


def with_florence(part: str, **changes: object) -> dict:
    florence = copy.deepcopy(FLORENCE)
    florence[part] |= changes
    return {"florence_config": florence}


def in_old_layout() -> dict:
    """As published policies have it."""
    vision = dict(FLORENCE["vision_config"])
    return {
        "florence_config": {
            "vision_config": {
                "model_type": "davit",
                "dim_embed": vision.pop("embed_dim"),
                "image_pos_embed": {"type": "learned_abs_2d", "max_pos_embeddings": 20},
                "visual_temporal_embedding": {"type": "COSINE", "max_temporal_embeddings": 5},
                "image_feature_source": ["spatial_avg_pool", "temporal_avg_pool"],
                "enable_checkpoint": False,
                **vision,
            },
            "text_config": {**FLORENCE["text_config"], "model_type": "florence2_language"},
            "projection_dim": 16,
            "vocab_size": 60,
            "pad_token_id": 1,
        }
    }


ONE_CAMERA = STATE | camera("top")
TWO_CAMERAS = STATE | camera("wrist", 56, 40) | camera("above")
THREE_CAMERAS = STATE | camera("top") | camera("left") | camera("right")
RESIZED = {"resize_imgs_with_padding": (48, 64)}
CASES = {
    "auto": case(ONE_CAMERA),
    "three_cameras": case(THREE_CAMERAS),
    "resized": case(TWO_CAMERAS, **RESIZED),
    # LeRobot counts empty cameras again whenever it validates the settings: here twice
    "empty_cameras": {
        **case(ONE_CAMERA, empty_cameras=2, **RESIZED),
        "ours": {"dropout": 0.0, "num_image_views": 5},
    },
    "more_views": case(ONE_CAMERA, num_image_views=3),
    "fewer_cameras": case(THREE_CAMERAS, robot=STATE | camera("left")),
    "ee6d": case(ONE_CAMERA, 20, action_mode="ee6d"),
    # LeRobot gives a robot 20 values, whatever it has
    "ee6d_one_arm": case(ONE_CAMERA, 10, False, action_mode="ee6d"),
    "joint": case(ONE_CAMERA, 14, action_mode="joint"),
    "agibot_ee6d": case(ONE_CAMERA, 20, action_mode="agibot_ee6d"),
    "franka_joint7": case(ONE_CAMERA, 7, action_mode="franka_joint7"),
    "so101_bimanual": case(ONE_CAMERA, 12, action_mode="so101_bimanual"),
    "normalized": case(
        ONE_CAMERA, normalization_mapping={"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MIN_MAX"}
    ),
    "domains": case(TWO_CAMERAS, domain_feature_key="next.domain", **RESIZED),
    "hetero": case(TWO_CAMERAS, use_hetero_proj=True, domain_feature_key="next.domain", **RESIZED),
    "without_prompts": case(ONE_CAMERA, len_soft_prompts=0, dim_time=7),
    "without_state": case(camera("top"), use_proprio=False),
    "padded_left": case(ONE_CAMERA, tokenizer_padding_side="left"),
    "longest": case(ONE_CAMERA, pad_language_to="longest"),
    "truncated": case(ONE_CAMERA, tokenizer_max_length=3),
    "frozen_vision": case(ONE_CAMERA, freeze_vision_encoder=True),
    "frozen_language": case(ONE_CAMERA, freeze_language_encoder=True),
    "prompts_only": case(
        ONE_CAMERA, freeze_vision_encoder=True, freeze_language_encoder=True, train_policy_transformer=False
    ),
    "frozen_prompts": case(ONE_CAMERA, train_soft_prompts=False),
    "rates": case(
        ONE_CAMERA,
        optimizer_lr=3e-4,
        optimizer_weight_decay=0.1,
        optimizer_soft_prompt_lr_scale=0.5,
        scheduler_warmup_steps=10,
        scheduler_decay_steps=40,
    ),
    "warm_up_rate": case(ONE_CAMERA, optimizer_soft_prompt_warmup_lr_scale=0.01),
    "scaled_words": case(ONE_CAMERA, **with_florence("text_config", scale_embedding=True)),
    "without_qkv_bias": case(ONE_CAMERA, **with_florence("vision_config", qkv_bias=False)),
    "old_settings": case(ONE_CAMERA, **in_old_layout()),
    "bf16": {**case(TWO_CAMERAS, dtype="bfloat16", **RESIZED), "in_bf16": True},
}


def make_files(folder: Path) -> None:
    make_tokenizer(folder / "tokenizer")


def training_batch(case: dict) -> dict[str, np.ndarray]:
    learned = actions(case["settings"]["chunk_size"], (1, 3), action_of(case))
    grippers = {"joint": (6, 13), "ee6d": (9, 19)}.get(case["settings"]["action_mode"], ())
    for gripper in grippers:
        learned["action"][..., gripper : gripper + 1] = learned["action"][..., gripper : gripper + 1] > 0
    batch = {**observation(case["robot"], "training"), **learned}
    if case["settings"].get("domain_feature_key"):
        batch["next.domain"] = np.array([2, 1])
    return batch


STORED = {"rates": 1e-9}

# the policies that one program trains and the other acts with; what is changed for the second
TRAINED = {
    **{name: value for name, value in TINY.items() if name != "florence_config"},
    "florence_config": json.dumps(FLORENCE),
    "resize_imgs_with_padding": "[32,32]",
}
TRAINED_OTHERWISE = {"use_hetero_proj": "true", "num_image_views": 4, "freeze_vision_encoder": "true"}
